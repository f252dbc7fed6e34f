"""What every registered method may send: no pixel, labels only where it says so, the documented number of bytes."""

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import MessageType
from support.common import rounds_of
from support.systems.contract import (
    ALL_METHODS,
    DISTINCT_METHODS,
    SHAPE,
    Make,
    Watched,
    assert_bytes_are_as_declared,
    watch,
)

from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.registry import METHODS

WITHOUT_GLOBAL_MODEL = {"centralized", "dcfcl", "lkc", "tfcl"}


@pytest.fixture(params=ALL_METHODS)
def watched(request: pytest.FixtureRequest, watched_run: Callable[[str], Watched]) -> Watched:
    return watched_run(request.param)


def test_no_pixel_crosses_the_wire(watched: Watched) -> None:
    dataset = Experiment(watched.config).dataset
    rows = {bytes(image.tobytes()) for image in np.asarray(dataset.images)}
    shape = dataset.images.shape[1:]
    for array in (array for crossing in watched.crossings for array in crossing.arrays()):
        assert array.dtype != np.uint8 or array.size < int(np.prod(shape)), array.shape
        if array.ndim == 4 and array.shape[1:] == shape:
            scaled = np.clip(np.rint(array * 255 if array.max() <= 1 else array), 0, 255).astype(np.uint8)
            assert not any(bytes(row.tobytes()) in rows for row in scaled)


def test_labels_cross_the_wire_if_and_only_if_the_method_says_so(watched: Watched) -> None:
    """Labels of any set of samples that a client holds, in any order and type, in arrays and in lists of numbers."""
    found = set()
    for crossing in watched.crossings:
        columns = {name: np.sort(labels) for name, labels in crossing.labels.items() if len(labels)}
        lists = [np.array(value) for _, value in crossing.numbers() if isinstance(value, list)]
        for array in [*crossing.arrays(), *lists]:
            ordered = np.sort(array, axis=None)
            found |= {(crossing.kind, name) for name, labels in columns.items() if np.array_equal(ordered, labels)}
    assert bool(found) == METHODS[watched.config.method].sends_labels, sorted(found)


def test_bytes_are_as_the_methods_page_says(watched: Watched) -> None:
    assert_bytes_are_as_declared(watched)


def test_the_methods_own_messages_are_the_registered_ones(watched: Watched) -> None:
    own = {crossing.kind for crossing in watched.crossings} - {MessageType.TRAIN, MessageType.EVALUATE}
    assert own == set(METHODS[watched.config.method].actions)


def test_only_declared_state_is_on_disk(watched: Watched) -> None:
    files = {path.name for path in watched.folder.glob("clients/client-*/*")}
    files.discard(".lock")
    assert files and all(name.startswith(("state-", "answer-")) and name.endswith(".npz") for name in files)
    top = {path.name for path in watched.folder.iterdir()}
    left = set() if watched.config.method in WITHOUT_GLOBAL_MODEL else {"model"}
    assert top == {
        *("config.json", "environment.json", "rounds.jsonl", "summary.json", "accuracy.png"),
        *("clients", "server", ".lock", ".fedkace", *left),
    }


@pytest.mark.parametrize("method", DISTINCT_METHODS)
def test_without_report_classes_no_histogram_leaves_a_client(small: Make, method: str) -> None:
    """In bf16, which sends no other bytes and works with every method."""
    run = watch(small(method=method, report_classes=False, precision="bf16", **{**SHAPE, "rounds": 2}))
    classes = Experiment(run.config).num_classes
    for crossing in run.crossings:
        lists = {name: np.array(value) for name, value in crossing.numbers() if isinstance(value, list)}
        assert wire.BUFFER_CLASSES not in lists
        for labels in crossing.labels.values():
            counts = np.sort(np.bincount(labels, minlength=classes))
            for array in [*crossing.arrays(), *lists.values()]:
                assert not counts.any() or not np.array_equal(np.sort(array, axis=None), counts)
    records = rounds_of(run.folder)
    assert all(record["buffer_classes"] == [None] * 3 and record["accuracy"] is not None for record in records)
    assert_bytes_are_as_declared(run)
