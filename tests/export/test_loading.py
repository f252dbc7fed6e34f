"""A model that was taken away: loaded without its run, it predicts as it did there; and files that try to do harm."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.common import SMALL
from support.made.models import changed, constant, picture, with_header

import fedkace_flwr
from fedkace_flwr import load_model
from fedkace_flwr.config import Config
from fedkace_flwr.errors import DataError, ModelError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.export.folder import write_folder
from fedkace_flwr.inference.kept_models import KeptModels, Predictor
from fedkace_flwr.inference.tensor_file import pack, unpack
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.atomic import header_of
from fedkace_flwr.storage.checkpoint import Checkpoints

IMAGES = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def several(**changes: object) -> KeptModels:
    """Two networks that predict together."""
    one, other = constant(1, 2), constant(2, 5)
    weights = {"local": one.weights["global"], "global": other.weights["global"]}
    met = (0, 2, 5, 7)
    content: dict[str, Any] = {"answers": {"local": met, "global": met}, **changes}
    return replace(one, weights=weights, seen=met, **content)


def test_the_left_model_predicts_as_the_runs_global_model(tmp_path: Path) -> None:
    config = Config.parse({**SMALL, "results-dir": str(tmp_path), "run-name": "run", "rounds": 2})
    run_inline(config)
    kept, experiment = Checkpoints(tmp_path / "run" / "server").newest(), Experiment(config)
    assert kept is not None
    model = load_model(tmp_path / "run" / "model")
    images = experiment.dataset.fetch(torch.arange(40))
    net = experiment.network({name: torch.from_numpy(array) for name, array in kept.weights.items()}).eval()
    with torch.inference_mode():
        logits = net(experiment.preprocess(images)).double()
    met = torch.tensor([name in model.classes_met for name in model.class_names])
    expected = logits.masked_fill(~met, -torch.inf).softmax(dim=1)
    labels, probabilities = model.predict(images)
    assert np.allclose(probabilities, expected.numpy(), atol=1e-6)
    assert labels == [model.class_names[label] for label in expected.argmax(dim=1)]
    assert 2 < len(model.classes_met) < 10 and str(model) == "<resnet18 by fedkace, round 2: 10 classes, 8 x 8>"


@pytest.mark.parametrize(
    "kept",
    [
        constant(3, 4, seen=(4, 7)),
        several(),
        several(mirrored=("global",)),
        several(mirrored=("global",), shares={"local": 0.5, "global": 0.25}),
        constant(3, 4, precision="bfloat16"),
    ],
    ids=["one", "mean", "mirrored", "weighted", "bf16"],
)
def test_networks_predict_together_as_the_client_does(tmp_path: Path, kept: KeptModels) -> None:
    write_folder(tmp_path / "model", kept)
    for path in (tmp_path / "model", tmp_path / "model" / "model.safetensors"):
        found = load_model(path).predict(IMAGES).probabilities
        assert np.array_equal(found, Predictor(kept).probabilities(IMAGES).numpy())


def test_weights_count_in_the_answer_and_only_files_with_weights_have_the_new_format() -> None:
    equal, weighted = several(), several(shares={"local": 1.0, "global": 0.0})
    first = replace(equal, answers={"local": equal.seen})
    assert np.allclose(Predictor(weighted).probabilities(IMAGES), Predictor(first).probabilities(IMAGES))
    assert not np.allclose(Predictor(weighted).probabilities(IMAGES), Predictor(equal).probabilities(IMAGES))
    versions = [header_of(pack(kept))[0]["__metadata__"]["fedkace_flwr"] for kept in (equal, weighted)]
    assert versions == ["1", "2"] and unpack(pack(weighted)).shares == weighted.shares


def test_what_is_not_needed_is_not_written(tmp_path: Path) -> None:
    kept = replace(several(), answers={"global": (1, 2)}, seen=(1, 2))
    assert pack(kept) == pack(replace(kept, weights={"global": kept.weights["global"]}, run="another"))


def test_every_kind_of_picture_is_taken(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", constant(1, 3))
    model = load_model(str(tmp_path / "model"))
    (tmp_path / "a.png").write_bytes(picture(size=(8, 8)))
    image = Image.open(tmp_path / "a.png")
    rows = np.asarray(image)
    stored = np.ascontiguousarray(rows.transpose(2, 0, 1))
    expected = model.predict(stored).probabilities
    for single in (tmp_path / "a.png", str(tmp_path / "a.png"), image, rows, torch.from_numpy(stored)):
        assert np.array_equal(model.predict(single).probabilities, expected)
        assert np.array_equal(model.predict([single, single]).probabilities, np.repeat(expected, 2, axis=0))
    assert np.array_equal(model.predict(stored[None]).probabilities, expected)
    assert np.array_equal(model.predict(rows[None]).probabilities, expected)
    assert model.predict([]).labels == [] and model.predict([]).probabilities.shape == (0, 10)
    grey = Image.fromarray(rows[:, :, 0])
    assert np.array_equal(model.predict(grey)[1], model.predict(rows[:, :, 0])[1])
    assert model.predict(Image.new("RGBA", (40, 20)))[0] == ["class 3"]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((3, 8, 8)), "the image: it is an array of float64; must be of uint8, from 0 to 255"),
        ([np.zeros((4, 8, 8), np.uint8)], r"image 0: it is an array of shape \(4, 8, 8\); must be \(3, 8, 8\), \(H, W"),
        ("nowhere.png", "nowhere.png: No such file or directory"),
        (["notes.txt"], "notes.txt: it is not an image, or its format is not supported"),
        (
            Image.new("F", (8, 8)),
            "the image: its pixels have Pillow's mode F, whose range is not known; must have 8 or",
        ),
        ([3], "image 0: it is a int; must be a path, a Pillow image, or an array"),
        (3, "images are int; must be a picture, or a sequence of pictures"),
    ],
)
def test_what_is_no_picture_is_named(tmp_path: Path, monkeypatch: Any, images: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no picture")
    write_folder(tmp_path / "model", constant(1, 3))
    with pytest.raises(DataError, match=message):
        load_model("model").predict(images)


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    write_folder(tmp_path, constant(1, 3))
    before = torch.random.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_the_package_is_imported_at_no_cost_and_the_loader_without_flower() -> None:
    program = (
        "import sys, fedkace_flwr as f; heavy = {'torch', 'numpy', 'flwr', 'fedkace_flwr.experiments'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert 'load_model' in dir(f); f.load_model;"
        "assert not {'flwr', 'ray', 'torchvision', 'fedkace_flwr.experiments'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_types_of_the_package_are_those_of_its_names() -> None:
    told = Path(fedkace_flwr.__file__).with_suffix(".pyi").read_text()
    names = [line.rpartition(" ")[2] for line in told.splitlines() if " import " in line]
    lazy = vars(fedkace_flwr)["_LAZY"]
    assert sorted(names) == sorted(lazy)
    for name in names:
        assert f"from {lazy[name]} import {name} as {name}\n" in told
        assert callable(getattr(fedkace_flwr, name))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fedkace_flwr.nothing  # type: ignore[attr-defined]  # noqa: B018


# Files of others


def _described(**strings: str | None) -> Callable[[], bytes]:
    return lambda: changed(constant(1, 3), **strings)


def _renamed() -> bytes:
    header, start = header_of(content := pack(constant(1, 3)))
    header["other"] = header.pop("output.bias")
    return with_header(header, content[start:])


def _not_finite() -> bytes:
    kept = constant(1, 3)
    kept.weights["global"]["output.bias"][:] = np.nan
    return pack(kept)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: b"", "is damaged, or no file of safetensors"),
        (lambda: (1 << 40).to_bytes(8, "little") + b"{}", "is damaged, or no file of safetensors"),
        (lambda: with_header([], b""), "is damaged, or no file of safetensors"),
        (lambda: with_header({"__metadata__": {"format": "pt"}}, b""), "is no model of fedkace_flwr"),
        (lambda: pack(constant(1, 3))[:-1], "is damaged .*"),
        (_described(fedkace_flwr="4"), "it has format '4', and this program reads formats 1, 2 and 3"),
        (_described(fedkace_flwr="2"), "its metadata lacks shares"),
        (_described(fedkace_flwr="2", shares='{"local": 1}'), "says shares = .*a weight of each network"),
        (_described(fedkace_flwr="2", shares='{"global": 0.5}'), "says shares = .*all views have 1 together"),
        (_described(fedkace_flwr="2", shares='{"global": NaN}'), "says shares = .*a weight of each network"),
        (_described(fedkace_flwr="2", shares="[]"), "says shares = .*a weight of each network"),
        (_described(mean=None), "its metadata lacks mean"),
        (_described(mean="[0, 0, NaN]"), "says mean = .* must be three numbers"),
        (_described(std="[1, 1, 0]"), "says std = .* must be three numbers"),
        (_described(width="1e9"), "says width = .* must be a whole number from 1"),
        (_described(width="1" * 5000), "says width = '1*; must be JSON"),
        (_described(stem="x"), "says stem = 'x'; must be auto or cifar or imagenet"),
        (_described(classes_met="[10]"), r"says classes_met = \[10\]; must be numbers of classes, from 0 to 9"),
        (_described(classes_met="[]"), r"says classes_met = \[\]"),
        (_described(answers='{"global": [true]}'), "says answers = .*numbers of classes"),
        (_described(answers="{}"), "says answers = .*networks with the classes"),
        (_described(answers='{"a": [1], "b": [1]}'), "belongs to none of its networks"),
        (_described(mirrored='["x"]'), "says mirrored = .*networks that predict"),
        (_described(switched_at="-1"), "says switched_at = -1; must be a round, or null"),
        (_described(class_names='["a"]', classes_met="[0]", answers='{"global": [0]}'), r"must be torch.float32 \(1, "),
        (_described(network="resnet99"), "do not fit .network = 'resnet99': must be one of resnet18"),
        (_described(network="cnn"), "it lacks 'body.0.weight', which its network has"),
        (_renamed, "it lacks 'output.bias'"),
        (_not_finite, "'output.bias' holds values that are not finite"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_in_one_line(
    tmp_path: Path, made: Callable[[], bytes], message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(made())
    with pytest.raises(ModelError, match=message) as refused:
        load_model(tmp_path)
    text = str(refused.value)
    assert text.startswith(str(tmp_path)) and "\n" not in text and len(text) < 700


@pytest.mark.matrix
@pytest.mark.parametrize("network", ["resnet18", "mobilenet-v3-small", "efficientnet-b0", "vit", "cnn"])
def test_a_network_that_would_not_fit_into_memory_is_refused_before_it_is_built(tmp_path: Path, network: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        changed(constant(1, 3), network=network, width=str(2**20), image_size="64")
    )
    tracemalloc.start()
    with pytest.raises(ModelError):
        load_model(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelError, match=r"there is no model\.safetensors; must be a folder that holds one, or the file"
    ):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="nowhere: there is no model"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    write_folder(tmp_path / "run" / "model", constant(1, 3))
    with pytest.raises(ModelError, match=rf"or the file; did you mean {tmp_path}/run/model\?$"):
        load_model(tmp_path / "run")
    monkeypatch.setattr(atomic, "_USUAL_LIMIT", 1000)
    with pytest.raises(ModelError, match="at most 1000 are read"):
        load_model(tmp_path / "run" / "model")
