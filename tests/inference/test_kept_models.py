"""What a client keeps for inference is what its evaluation tested, and stands for itself."""

import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.common import rounds_of
from support.made.models import CLASSES, blank, changed, constant, picture
from support.made.stored import read_state
from support.systems.in_process import Federation

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.data.readers.catalogue import framing_of
from fedkace_flwr.errors import DataError, StateError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.inference import model_files as serving
from fedkace_flwr.inference.kept_models import KeptModels, Predictor
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.inference.tensor_file import pack, unpack
from fedkace_flwr.messaging import wire
from fedkace_flwr.registry import METHODS
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.storage import atomic

Make = Callable[..., Config]
SHAPE = {"rounds": 3, "epochs": 2, "capacity": 12, "tfcl_server_epochs": 2, "keep_models": "always"}

# Centralized keeps none: each round's network is thrown away after its test, or the test is interpolated.
# Of FedKACE's presets only these answer by other models than FedKACE itself.
ANSWERING_PRESETS = {"as2", "as3", "lkc"}
SERVED = [
    name
    for name, method in sorted(METHODS.items())
    if name != "centralized" and (not method.preset or name in ANSWERING_PRESETS)
]
CASES = [
    *(
        pytest.param({"method": name}, id=name, marks=[] if name == "fedkace" else [pytest.mark.slow])
        for name in SERVED
    ),
    pytest.param({"method": "er", "predict-with": "local", "evaluate": "both"}, id="er-local", marks=pytest.mark.slow),
    pytest.param({"method": "fedkace", "precision": "bf16"}, id="bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("changes", CASES)
def test_what_is_served_is_what_was_evaluated(small: Make, tmp_path: Path, changes: dict[str, object]) -> None:
    config = small(**SHAPE, **changes)
    run_inline(config)
    experiment = Experiment(configured(config)[1])
    for client in range(config.stream.clients):
        folder = tmp_path / "run" / "clients" / f"client-{client:03d}"
        assert sorted(path.name for path in folder.glob("models-*")) == [
            "models-000002.safetensors",
            "models-000003.safetensors",
        ]
        state, predictor = read_state(folder / "state-000003.npz"), load_newest(folder)
        test = experiment.test_set(client, state.seen)
        found = predictor.probabilities(test.images(experiment.dataset.fetch))
        assert float((found.argmax(1) == test.labels).double().mean()) == state.evaluation[wire.ACCURACY]

        kept = predictor.kept
        assert found[:, ~state.seen].eq(0).all() and found.sum(1).allclose(torch.ones(len(test), dtype=torch.float64))
        assert (kept.round, kept.trained, kept.run, kept.method) == (3, 3, state.run, config.method)
        assert kept.seen == tuple(state.seen.nonzero().squeeze(1).tolist())
        assert kept.switched_at == state.global_since
        assert kept.answering == (
            "task-3" if config.method == "tfcl" else "local" if state.global_since is None else "global"
        )
        assert kept.class_names == experiment.dataset.class_names


def test_the_local_model_is_kept_until_the_switch_and_the_global_one_after_it(small: Make) -> None:
    federation = Federation(small(rounds=30, samples_per_class=3, keep_models="always", patience=1))
    folder, switched, rounds = federation.folder / "client-000", False, iter(range(1, 31))
    for number in rounds:
        trained = federation.train(0, number)
        federation.weights = dict(trained.weights)
        metrics = federation.evaluate(0, number).metrics
        switched = switched or wire.SWITCHED_AT in metrics
        kept = load_newest(folder).kept
        assert set(kept.weights) == set(kept.answers) == ({"global"} if switched else {"local"})
        for name, array in trained.weights.items():
            assert np.array_equal(kept.weights[kept.answering][name], array)
        if kept.answering == "global" and metrics[wire.SWITCHED_AT] < number:
            break
    else:
        pytest.fail("the switch that this test is about did not happen")


def test_a_round_missed_leaves_the_local_model_answering(small: Make) -> None:
    federation = Federation(small(keep_models="always"))
    trained = federation.train(0, 1)
    federation.evaluate(0, 1)
    federation.evaluate(0, 2)
    kept = load_newest(federation.folder / "client-000").kept
    assert (kept.round, kept.trained, kept.answering) == (2, 1, "local")
    assert all(np.array_equal(kept.weights["local"][name], trained.weights[name]) for name in trained.weights)


def test_a_lost_local_model_leaves_the_generation_before(small: Make) -> None:
    federation = Federation(small(keep_models="always"))
    folder = federation.folder / "client-000"
    federation.train(0, 1)
    federation.evaluate(0, 1)
    (folder / "answer-000001.npz").unlink()
    assert federation.evaluate(0, 2).metrics[wire.ACCURACY] > 0
    assert load_newest(folder).kept.round == 1


def test_a_crash_before_the_state_is_saved_is_made_good(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(small(keep_models="always"))
    folder = federation.folder / "client-000"
    federation.train(0, 1)
    write = serving.write

    def crash(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(serving, "write", crash)
        assert federation.send("evaluate", 0, 1).has_error()
    before = (folder / "models-000001.safetensors").read_bytes()
    assert read_state(folder / "state-000001.npz").evaluated == 0
    federation.evaluate(0, 1)
    assert (folder / "models-000001.safetensors").read_bytes() == before
    assert read_state(folder / "state-000001.npz").evaluated == 1


@pytest.mark.slow
def test_simulation_keeps_no_models_and_keeping_them_changes_no_number(small: Make, tmp_path: Path) -> None:
    for name, keep in (("usual", "auto"), ("keeping", "always"), ("never", "never")):
        run_inline(small(run_name=name, keep_models=keep))

    assert rounds_of(tmp_path / "usual") == rounds_of(tmp_path / "keeping") == rounds_of(tmp_path / "never")
    assert not [*(tmp_path / "usual").rglob("models-*"), *(tmp_path / "never").rglob("models-*")]
    assert len([*(tmp_path / "keeping").rglob("models-*")]) == 2 * 3


def test_a_new_run_in_the_same_folder_takes_over_from_the_old_one(tmp_path: Path) -> None:
    for number in (14, 15):
        serving.write(tmp_path, constant(number, 1))
    serving.write(tmp_path, constant(1, 2, run="new"))
    assert [path.name for path in tmp_path.glob("models-*")] == ["models-000001.safetensors"]
    assert load_newest(tmp_path).kept.run == "new"
    kept = sorted((tmp_path / "earlier" / "made").iterdir())
    assert [path.name for path in kept] == ["models-000014.safetensors", "models-000015.safetensors"]

    serving.write(tmp_path, constant(16, 1))  # the old one goes on, and its former models are superseded
    assert load_newest(tmp_path).kept.run == "made" and not list((tmp_path / "earlier" / "made").iterdir())
    assert [path.name for path in (tmp_path / "earlier" / "new").iterdir()] == ["models-000001.safetensors"]


def test_a_folder_for_models_alone_keeps_those_of_eight_earlier_runs(tmp_path: Path) -> None:
    for number in range(11):
        serving.write(tmp_path, constant(1, 1, run=f"{number:02d}"), os.getgid())
    assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == [
        f"{number:02d}" for number in range(2, 10)
    ]


def _tensors(**changes: Any) -> Callable[[KeptModels], bytes]:
    """Harm to the arrays of a model: others in their place, or none."""

    def harmed(kept: KeptModels) -> bytes:
        arrays = {**kept.weights["global"], **{name.replace("__", "."): array for name, array in changes.items()}}
        return pack(
            replace(kept, weights={"global": {name: array for name, array in arrays.items() if array is not None}})
        )

    return harmed


def _told(**strings: str | None) -> Callable[[KeptModels], bytes]:
    return lambda kept: changed(kept, **strings)


def _stored(change: Callable[[bytes], bytes]) -> Callable[[KeptModels], bytes]:
    return lambda kept: change(pack(kept, stored=True))


DAMAGE: dict[str, Callable[[KeptModels], bytes]] = {
    "empty": _stored(lambda whole: b""),
    "cut short": _stored(lambda whole: whole[:-9]),
    "zeros at the end": _stored(lambda whole: whole[:-4096] + bytes(4096)),
    "one bit of a weight": _stored(lambda whole: whole[:-900] + bytes([whole[-900] ^ 1]) + whole[-899:]),
    "one letter of a name": _stored(lambda whole: whole.replace(b"class 7", b"class 8")),
    "a huge network": _told(width="1000000000"),
    "another shape": _tensors(output__bias=np.zeros(7, np.float32)),
    "not a number": _tensors(output__bias=np.full(CLASSES, np.nan, np.float32)),
    "beyond all numbers": lambda kept: pack(
        replace(kept, weights={"global": {k: a * a.dtype.type(1e18) for k, a in kept.weights["global"].items()}})
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("harm", DAMAGE)
def test_a_damaged_generation_gives_way_to_the_one_before_and_stays_where_it_is(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        serving.write(tmp_path, constant(number, 3))
    path = tmp_path / "models-000002.safetensors"
    path.write_bytes(DAMAGE[harm](constant(2, 4)))
    assert load_newest(tmp_path).kept.round == 1
    (said,) = caplog.messages
    assert said.startswith(f"{path}: ") and said.endswith("; using the model of round 1 instead") and "\n" not in said
    assert path.exists()
    (tmp_path / "models-000001.safetensors").unlink()
    with pytest.raises(StateError, match=r"^[^\n]*models-000002\.safetensors: [^\n]*$"):
        load_newest(tmp_path)


def test_what_is_no_file_gives_way_too(tmp_path: Path) -> None:
    serving.write(tmp_path, constant(1, 3))
    (tmp_path / "models-000002.safetensors").mkdir()
    assert load_newest(tmp_path).kept.round == 1


def test_models_of_an_older_version_are_named_until_the_client_writes_new_ones(tmp_path: Path) -> None:
    (tmp_path / "models-000003.npz").write_bytes(b"of an older version")
    with pytest.raises(
        StateError, match=r"there is no model yet; models-\*\.npz is of an older version; the client keeps"
    ):
        load_newest(tmp_path)
    serving.write(tmp_path, constant(4, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["models-000004.safetensors"]


def test_folders_without_a_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="nowhere: there is no such folder"):
        load_newest(tmp_path / "nowhere")
    with pytest.raises(StateError, match=r"there is no model yet; clients keep one .* keep-models"):
        load_newest(tmp_path)
    serving.write(tmp_path / "client-007", constant(1, 1))
    with pytest.raises(StateError, match="name one of the folders in it: client-007"):
        load_newest(tmp_path)
    serving.write(tmp_path / "run" / "clients" / "client-003", constant(1, 1))
    with pytest.raises(StateError, match="name one of the folders in it: clients/client-003"):
        load_newest(tmp_path / "run")


@given(st.sets(st.integers(0, CLASSES - 1), min_size=1), st.integers(0, CLASSES - 1), st.integers(1, 12))
def test_a_class_not_met_has_probability_0_and_is_never_named(seen: set[int], label: int, top: int) -> None:
    predictor = Predictor(constant(1, label, tuple(sorted(seen))))
    image = np.full((3, 8, 8), 77, np.uint8)
    (found,) = predictor.probabilities(torch.from_numpy(image)[None])
    assert {number for number in range(CLASSES) if found[number] > 0} == seen
    assert float(found.sum()) == pytest.approx(1)
    named = [each["class"] for each in predictor.answer(image, top)["classes"]]
    assert len(named) == min(top, len(seen)) and set(named) <= {f"class {number}" for number in seen}
    assert named[0] == f"class {label if label in seen else max(seen)}"


def test_a_file_of_a_data_set_of_arrays_becomes_the_very_row(small: Make) -> None:
    for size in (8, 13):
        dataset = load_dataset(small(image_size=size).data)
        native = load_dataset(small().data)
        for row in (0, 700):
            file = io.BytesIO()
            Image.fromarray(native.images[row].transpose(1, 2, 0)).save(file, "PNG")
            square = read_square(file.getvalue(), framing_of(DataConfig(), size))
            assert np.array_equal(square, dataset.images[row])


def test_a_file_of_a_folder_becomes_the_very_row(small: Make, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name, size in (("a", (30, 20)), ("b", (17, 40))):
            path = tmp_path / "pictures" / split / name / "0.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(picture(size=size, seed=len(split)))
    config = small(dataset="folder", data_dir=str(tmp_path / "pictures"), image_size=16)
    dataset = load_dataset(config.data)
    for row, name in enumerate(("train/a", "train/b", "val/a", "val/b")):
        square = read_square(tmp_path / "pictures" / name / "0.png", framing_of(config.data, 16))
        assert np.array_equal(square, dataset.images[row])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image, or its format is not supported"),
        (b"nothing of the kind", "not an image, or its format is not supported"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n",
            "not an image, or its format is not supported",
        ),
        (picture(size=(300, 200))[:-5000], "it is damaged"),
        (blank(4097, 3072), "4097 x 3072 pixels; at most 12,582,912 are"),
        (blank(14000, 14000), "too many pixels; at most 12,582,912 are"),
        (blank(1, 60_000), "too long and thin: 1 x 60000"),
    ],
    ids=["empty", "text", "postscript", "cut", "large", "bomb", "thin"],
)
def test_pictures_that_will_not_do_are_refused_in_a_line(content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=rf"^[^\n]*{reason}[^\n]*$"):
        read_square(content, Framing.of_files(224))


def test_files_that_cannot_be_read_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_square(tmp_path / "none.png", Framing.of_files(8))
    with pytest.raises(DataError, match="it is not a regular file"):
        read_square(tmp_path, Framing.of_files(8))


def test_a_file_that_may_be_read_at_last_counts_as_changed(tmp_path: Path) -> None:
    serving.write(tmp_path, constant(1, 1))
    before = serving.listing(tmp_path)
    for path in tmp_path.glob("models-*"):
        path.chmod(0o640)
    assert serving.listing(tmp_path) != before


def test_columns_of_large_numbers_can_be_kept(small: Make) -> None:
    kept = replace(constant(1, 1), mean=(1.7e12, 0.0, 0.0), std=(3e9, 1.0, 1.0))
    assert unpack(pack(kept)).mean == kept.mean


def test_a_vanishing_file_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer drops what was listed before it could be read."""
    serving.write(tmp_path, constant(1, 1))
    read, races = atomic.read_body, iter(range(2, 8))

    def late(path: Path, *parse: Any) -> Any:
        number = next(races, None)
        if number is not None:
            path.unlink()
            serving.write(tmp_path, constant(number, 1))
        return read(path, *parse)

    monkeypatch.setattr(atomic, "read_body", late)
    assert load_newest(tmp_path).kept.round == 7
