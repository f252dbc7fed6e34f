"""Models as ONNX, answered by the real onnxruntime: the same probabilities for any number of images."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.made.models import constant
from support.tools import need_modules

from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import ModelError
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.export import onnx_file
from fedkace_flwr.export.loading import LoadedModel
from fedkace_flwr.export.onnx_file import TOLERANCE, to_onnx
from fedkace_flwr.inference.kept_models import KeptModels
from fedkace_flwr.networks.catalogue import NETWORKS, seeded
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.storage.atomic import Array

CLASSES, MET = 5, (0, 1, 3)


@pytest.fixture(autouse=True)
def packages() -> None:
    need_modules("onnx", "onnxscript", "onnxruntime")


def weights(net: Network, seed: int) -> dict[str, Array]:
    """Weights whose probabilities are far from equal, and statistics as after a training."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in net.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0, generator=generator)
        elif name.endswith("running_mean"):
            buffer.normal_(generator=generator)
    with torch.no_grad():
        net.output.weight.normal_(generator=generator)
    return as_arrays(net.state_dict())


def model(network: str, size: int, answers: dict[str, tuple[int, ...]], **changes: object) -> KeptModels:
    shape = (3, size) if network == "cnn1d" else ()
    blueprint = Blueprint(CLASSES, shape or size, 4, "cifar")
    kept = constant(1, 1)
    made = {name: weights(seeded(network, blueprint, seed), seed) for seed, name in enumerate(answers)}
    return replace(
        kept,
        network=network,
        width=4,
        framing=None if shape else Framing.of_arrays(size),
        shape=shape,
        class_names=tuple("abcde"),
        seen=MET,
        answers=answers,
        weights=made,
        std=(0.25, 1.0 if shape else 0.0, 0.1),
        **changes,  # type: ignore[arg-type]
    )


def assert_same_answers(kept: KeptModels, content: bytes) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    loaded, form = LoadedModel(kept), kept.form
    for count in (1, 2, 7):
        generator, shape = np.random.default_rng(count), (count, *form.shape)
        samples = (
            generator.integers(0, 256, shape, np.uint8) if form.is_picture else generator.random(shape, np.float32)
        )
        (found,) = session.run(None, {"images" if form.is_picture else "arrays": samples})
        wanted = loaded.predict(samples).probabilities
        assert found.dtype == np.float32 and np.abs(found - wanted).max() <= TOLERANCE
        assert (found[:, [2, 4]] == 0).all() and wanted.std() > 0.01


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("network", [*NETWORKS, "timm:test_resnet", "timm:test_vit"])
def test_every_network_answers_the_same_as_onnx(network: str) -> None:
    if network not in NETWORKS:
        need_modules("timm")
    kept = model(network, 8 if network in NETWORKS else 32, {"global": MET})
    content, difference = to_onnx(kept)
    assert difference is not None and difference <= TOLERANCE
    assert_same_answers(kept, content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "changes"),
    [
        ({"local": MET, "global": MET}, {"mirrored": ("global",)}),
        (
            {"local": MET, "global": MET},
            {"mirrored": ("global",), "shares": {"local": 0.5, "global": 0.25}},
        ),
    ],
    ids=["mean", "weighted"],
)
def test_networks_that_predict_together_do_so_as_onnx(
    answers: dict[str, tuple[int, ...]], changes: dict[str, object]
) -> None:
    kept = model("cnn", 4, answers, **changes)
    assert_same_answers(kept, to_onnx(kept)[0])


@pytest.fixture(scope="module")
def exported() -> tuple[KeptModels, bytes]:
    need_modules("onnx", "onnxscript", "onnxruntime")
    kept = model("cnn", 4, {"global": MET}, precision="bfloat16")
    return kept, to_onnx(kept)[0]


@pytest.mark.slow
def test_the_file_says_how_to_use_it_and_nothing_of_this_machine(exported: tuple[KeptModels, bytes]) -> None:
    import onnx

    kept, content = exported
    found = onnx.load_from_string(content)
    told = {each.key: each.value for each in found.metadata_props}
    assert json.loads(told["class_names"]) == list("abcde") and json.loads(told["classes_met"]) == list(MET)
    (images,), (answers,) = found.graph.input, found.graph.output
    dimensions = images.type.tensor_type.shape.dim
    assert (
        images.name == "images" and dimensions[0].dim_param and [each.dim_value for each in dimensions[1:]] == [3, 4, 4]
    )
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8 and answers.name == "probabilities"
    for words in (str(Path(__file__).parents[2]), "site-packages", "forward", "stack_trace"):
        assert words.encode() not in content
    assert_same_answers(replace(kept, precision="float32"), content)


@pytest.mark.slow
def test_onnx_that_would_answer_otherwise_is_not_written(
    exported: tuple[KeptModels, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, content = exported
    weights = dict(kept.weights["global"])
    weights["output.bias"] = weights["output.bias"] + np.arange(5, dtype=np.float32)
    changed = replace(kept, weights={"global": weights})
    monkeypatch.setattr(onnx_file, "_exported", lambda _: content)
    with pytest.raises(
        ModelError, match=r"network = 'cnn': as ONNX its probabilities differ by .*; must be at most 0.0001"
    ):
        to_onnx(changed)


class _Unexportable(Network):
    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Linear(3, CLASSES)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(2, 3)) if float(x.sum()) > 0 else x.amax(dim=(2, 3))


@pytest.mark.slow
def test_a_network_that_cannot_be_exported_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "branching", lambda _: _Unexportable())
    kept = model("branching", 4, {"global": MET})
    with pytest.raises(ModelError, match=r"network = 'branching': cannot be exported to ONNX \(") as refused:
        to_onnx(kept)
    assert "\n" not in str(refused.value)
