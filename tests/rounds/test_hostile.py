"""Clients that lie or break: the run goes on as if they had said nothing."""

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import psutil
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from support.common import rounds_of
from support.doubles.damages import FAULTS, MODEL_FAULTS, filled, named
from support.doubles.hostile import (
    CLIENTS,
    HOSTILE,
    ROUNDS,
    HostileWire,
    RecordingWire,
    Reference,
    assert_nothing_changes,
    configured,
)
from support.systems.runs import folder_of

from fedkace_flwr import server_app
from fedkace_flwr.clients import fedcbdr as fedcbdr_names
from fedkace_flwr.clients import tfcl as tfcl_names
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.results import run_folder

GIGABYTE = 2**30


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Each reference is made once."""

    @lru_cache
    def make(method: str, *kinds: str) -> Reference:
        folder = tmp_path_factory.mktemp("reference")
        reference = Reference(configured(folder, "reference", method), frozenset(kinds))
        server_app.run(RecordingWire(reference), reference.config, run_id=1)
        return reference

    return make


def by_method(name: str) -> pytest.MarkDecorator:
    """Let one worker run all tests of a method, so that its reference is made once."""
    return pytest.mark.xdist_group(f"hostile to {name}")


def _rare(common: bool) -> list[pytest.MarkDecorator]:
    return [] if common else [pytest.mark.exhaustive]


# The driver reads and checks the replies of all methods, so one method meets every fault, the others one of each kind.
ONE_OF_EACH_KIND = (
    *("nan", "huge", "swapped keys", "an exception"),
    *("not sent", "absurd samples", "sat out with a model"),
)
METHODS = ["fedavg", "dcfcl", "fedcbdr", "er", "lkc", "ofcl", "refed"]
MATRIX = [
    *(
        pytest.param("fedkace", fault, marks=[by_method("fedkace"), *_rare(fault in ONE_OF_EACH_KIND)])
        for fault in [*MODEL_FAULTS, *FAULTS]
    ),
    *(
        pytest.param(method, fault, marks=[by_method(method), pytest.mark.slow, *_rare(fault == "nan")])
        for method in METHODS
        for fault in ONE_OF_EACH_KIND
        if (method, fault) != ("lkc", "huge")  # whose models go back to their own clients
    ),
]


@pytest.mark.parametrize(("method", "fault"), MATRIX)
def test_the_model_is_that_of_the_honest_alone(
    reference_of: Callable[..., Reference], tmp_path: Path, method: str, fault: str
) -> None:
    damage, kind = (MODEL_FAULTS | FAULTS)[fault]
    failures = assert_nothing_changes(reference_of(method), tmp_path, damage)
    trained = [failure for failure in failures if failure["phase"] == "training"]
    assert {failure["client"] for failure in trained} == HOSTILE and len(trained) == len(HOSTILE) * ROUNDS
    assert {failure["kind"] for failure in trained} == {kind}
    assert all(len(failure["reason"]) < 500 and len(failure["reason"].splitlines()) == 1 for failure in failures)


LESSON_FAULTS = {name: fault for name, fault in (MODEL_FAULTS | FAULTS).items() if name in ONE_OF_EACH_KIND} | {
    "labels out of range": (named(tfcl_names.LABELS, lambda a: a + 1000), "content"),
    "maps beyond all images": (
        named(tfcl_names.FEATURES, lambda a: np.zeros((1, a.shape[1], 64, 64), np.float32)),
        "size",
    ),
}


@pytest.mark.matrix
@pytest.mark.slow
@by_method("tfcl")
@pytest.mark.parametrize("fault", LESSON_FAULTS)
def test_what_tfcl_teaches_is_learnt_from_the_honest_alone(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    failures = assert_nothing_changes(reference_of("tfcl"), tmp_path, LESSON_FAULTS[fault][0])
    assert {failure["client"] for failure in failures if failure["phase"] == "training"} == HOSTILE


QUERY_FAULTS = {
    name: fault
    for name, fault in (MODEL_FAULTS | FAULTS).items()
    if name in {"nan", "inf", "shape", "dtype", "a name more", "no arrays", "an exception", "not sent"}
    or name in {"nothing", "cut short", "a header of a terabyte", "another serialisation"}
}
FEATURE_FAULTS = {**QUERY_FAULTS, "huge": MODEL_FAULTS["huge"]}
SCORE_FAULTS = {
    **QUERY_FAULTS,
    "above one": (named(fedcbdr_names.SCORES, lambda a: a + 2), "content"),
    "below zero": (named(fedcbdr_names.SCORES, lambda a: a - 2), "content"),
    "labels out of range": (named(fedcbdr_names.LABELS, lambda a: a + 1000), "content"),
}


@pytest.mark.matrix
@pytest.mark.slow
@by_method("fedcbdr")
@pytest.mark.parametrize("fault", FEATURE_FAULTS)
def test_features_of_the_hostile_touch_no_ones_selection(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    reference = reference_of("fedcbdr", fedcbdr_names.FEATURES_QUERY)
    failures = assert_nothing_changes(reference, tmp_path, FEATURE_FAULTS[fault][0])
    assert {failure["client"] for failure in failures if failure["phase"] == fedcbdr_names.FEATURES_QUERY} == HOSTILE


@pytest.mark.matrix
@pytest.mark.slow
@by_method("fedcbdr")
@pytest.mark.parametrize("fault", SCORE_FAULTS)
def test_scores_of_the_hostile_touch_no_ones_selection(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    reference = reference_of("fedcbdr", fedcbdr_names.SCORES_QUERY)
    failures = assert_nothing_changes(reference, tmp_path, SCORE_FAULTS[fault][0])
    assert {failure["client"] for failure in failures if failure["phase"] == fedcbdr_names.SCORES_QUERY} == HOSTILE


METRIC_FAULTS = {
    name: fault
    for name, fault in FAULTS.items()
    if (fault[1] == "metrics" and name != "more samples than fit 64 bits")
    or fault[1] in ("error", "refused", "records")
}


@pytest.mark.slow
@pytest.mark.matrix
@by_method("fedkace")
@pytest.mark.parametrize("fault", [name for name in METRIC_FAULTS if "sat out" not in name])
def test_a_hostile_evaluation_counts_for_nothing(
    reference_of: Callable[..., Reference], tmp_path: Path, fault: str
) -> None:
    reference = reference_of("fedkace", MessageType.EVALUATE)
    failures = assert_nothing_changes(reference, tmp_path, METRIC_FAULTS[fault][0])
    assert {failure["client"] for failure in failures} == HOSTILE
    assert {failure["phase"] for failure in failures} == {"evaluation"}


# Sizes


@pytest.mark.matrix
@pytest.mark.slow
@by_method("er")
@pytest.mark.parametrize("place", ["an array of the model", "another record", "a text", "numbers"])
def test_a_message_of_a_gigabyte_is_refused_unread(
    reference_of: Callable[..., Reference], tmp_path: Path, place: str
) -> None:
    """The bytes are zeros that nobody has touched, which take up no memory until somebody does."""
    giant = bytes(GIGABYTE)

    def damage(content: RecordDict) -> RecordDict | None:
        if wire.ARRAYS not in content.array_records:
            return None
        if place == "an array of the model":
            content.array_records[wire.ARRAYS]["output.bias"] = Array("float32", (10,), "numpy.ndarray", giant)
        elif place == "another record":
            content["more"] = ArrayRecord({"x": Array("uint8", (GIGABYTE,), "numpy.ndarray", giant)})
        elif place == "a text":
            content["more"] = ConfigRecord({"x": giant})
        else:
            content["more"] = MetricRecord({str(number): number for number in range(200_000)})
        return content

    # The test's wire copies answers before it damages them, never after.
    before = psutil.Process().memory_info().rss
    failures = assert_nothing_changes(reference_of("er"), tmp_path, damage)
    assert psutil.Process().memory_info().rss - before < GIGABYTE / 4
    trained = [failure for failure in failures if failure["phase"] == "training"]
    assert {failure["kind"] for failure in trained} == {"size"}
    assert all("left unread" in failure["reason"] for failure in trained)


# What a run says of them


def test_failures_are_counted_by_client_and_kind_in_the_summary_and_in_the_last_line_of_the_log(
    reference_of: Callable[..., Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, lines = reference_of("fedavg"), []
    handler = type("Ear", (logging.Handler,), {"emit": lambda self, record: lines.append(record.getMessage())})()
    server_app.logger.addHandler(handler)
    try:
        assert_nothing_changes(reference, tmp_path, filled(np.nan))
    finally:
        server_app.logger.removeHandler(handler)
    summary = run_folder.read_json(tmp_path / "hostile" / "summary.json")
    assert summary["failures_by_client"] == {
        str(client): {"refused": ROUNDS, "values": ROUNDS} for client in sorted(HOSTILE)
    }
    assert summary["failures"] == 2 * ROUNDS * len(HOSTILE)
    assert "left out: client 1 (3 refused, 3 values), client 3 (3 refused, 3 values); see" in lines[-1]


def test_a_message_that_was_not_accepted_is_not_said_to_have_had_no_reply_in_time(
    reference_of: Callable[..., Reference],
) -> None:
    for record in rounds_of(folder_of(reference_of("fedavg").config)):
        told = {(each["kind"], each["reason"]) for each in record["failures"]}
        assert told == {
            (
                "refused",
                "the grid did not accept the message to it: its SuperNode has left, or the message is too large",
            )
        }


@pytest.mark.parametrize("method", ["fedkace", "fedavg"])
def test_without_the_defence_what_is_large_and_finite_gets_through(
    reference_of: Callable[..., Reference], tmp_path: Path, method: str
) -> None:
    """That the defence, and nothing else, keeps it out."""
    reference = reference_of(method)
    config = configured(tmp_path, "unbound", method, defence="off")
    grid = HostileWire(reference, config, MODEL_FAULTS["fifty times"][0])
    with pytest.raises(RunError):  # nobody knows an answer to another model than the reference's
        server_app.run(grid, config, run_id=1)
    assert {(MessageType.EVALUATE, client) for client in range(CLIENTS)} <= set(grid.unheard_of)
