"""Weights to start from: files that fit, and files that others may have made to harm."""

import importlib
import io
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save as safetensors_of
from support.common import rounds_of
from support.made.networks import seeded_resnet18
from support.tools import need_modules
from torch import Tensor

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.config import Config
from fedkace_flwr.data import weights_file
from fedkace_flwr.data.weights_file import weights_for
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.networks.catalogue import built, seeded
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.networks.trainable import freeze
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.storage.files import read_bytes

Make = Callable[..., Config]
Weights = dict[str, Tensor]


def network(seed: int = 0) -> Network:
    return seeded_resnet18(10, 4, "cifar", seed)


def written(path: Path, weights: object) -> Path:
    """A file of weights, in the format that its name says."""
    if path.suffix == ".safetensors":
        path.write_bytes(safetensors_of({name: each.contiguous() for name, each in weights.items()}))  # type: ignore[attr-defined]
    else:
        torch.save(weights, path)
    return path


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth", "weights.pt"])
def test_a_file_gives_all_weights_but_the_output_layers(tmp_path: Path, name: str) -> None:
    source = network(1).state_dict()
    found = weights_for(network(2), written(tmp_path / name, source))
    wanted = {key for key in source if not key.startswith("output.") and not key.endswith(".num_batches_tracked")}
    assert set(found) == wanted
    assert all(torch.equal(found[key], source[key]) for key in wanted)


def test_torchvisions_names_other_classes_and_half_precision_fit_too(tmp_path: Path) -> None:
    theirs = import_torchvision().models.resnet18(num_classes=7).half().state_dict()
    stored = OrderedDict((name, each) for name, each in theirs.items() if not name.endswith("num_batches_tracked"))
    net = built("resnet18", Blueprint(10, 224, 64))
    found = weights_for(net, written(tmp_path / "resnet18.pth", stored))
    assert torch.equal(found["blocks.2.shortcut.0.weight"], theirs["layer2.0.downsample.0.weight"].float())
    assert {each.dtype for each in found.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["levit_128s", "repvit_m0_9", "shvit_s1"])
def test_what_timm_drops_with_a_models_last_layer_is_left_out(tmp_path: Path, name: str) -> None:
    """Normalisation and hidden layers around it."""
    need_modules("timm")
    net = built(f"timm:{name}", Blueprint(5, 224, 8))
    theirs = importlib.import_module("timm").create_model(name).state_dict()
    found = weights_for(net, written(tmp_path / "model.safetensors", theirs))
    assert found and all(torch.equal(theirs[key.removeprefix("body.")], each) for key, each in found.items())


def of_timm(tmp_path: Path, size: int = 32) -> tuple[Network, Weights, Path]:
    """A network of timm, and a published state dict for images of another size, with the output layer, in a file."""
    need_modules("timm")
    net = seeded("timm:test_vit", Blueprint(10, size, 8), 0)
    theirs = importlib.import_module("timm").create_model("test_vit", num_classes=7).state_dict()
    return net, theirs, written(tmp_path / "model.safetensors", theirs)


def test_files_of_timm_fit_by_their_names_and_for_images_of_other_sizes(tmp_path: Path) -> None:
    net, theirs, path = of_timm(tmp_path)
    found = weights_for(net, path)
    assert set(found) == {name for name in net.state_dict() if not name.startswith("output.")}
    same = {name for name in theirs if not name.startswith("head.") and name != "pos_embed"}
    assert all(torch.equal(found[f"body.{name}"], theirs[name]) for name in same)
    assert found["body.pos_embed"].shape[1] < theirs["pos_embed"].shape[1]
    backbone = {name: each.half() for name, each in theirs.items() if not name.startswith("head.")}
    alone = weights_for(net, written(tmp_path / "backbone.pth", backbone))
    assert torch.allclose(alone["body.pos_embed"], found["body.pos_embed"], atol=1e-3)
    own = {**net.state_dict(), **found}
    again = weights_for(net, written(tmp_path / "own.safetensors", own))
    assert all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {name: each for name, each in w.items() if name != "cls_token"}, r"does not fit .*cls_token"),
        (lambda w: {**w, "decoder.weight": torch.ones(2)}, r"does not fit .*decoder\.weight"),
        (lambda w: {**w, "cls_token": torch.full_like(w["cls_token"], torch.nan)}, r"cls_token' holds values that are"),
        (lambda w: {"head.weight": w["head.weight"]}, "holds no layer of the network"),
        (lambda w: network().state_dict(), "does not fit the network"),
    ],
)
def test_files_that_do_not_fit_a_network_of_timm_are_refused(
    tmp_path: Path, change: Callable[[Weights], Weights], message: str
) -> None:
    net, theirs, path = of_timm(tmp_path)
    written(path, change(theirs))
    with pytest.raises(ConfigError, match=f"weights-file = .*{message}") as refusal:
        weights_for(net, path)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of published weights on a machine without a network."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def unreachable(*args: object, **kwargs: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    return tmp_path


def test_published_weights_of_timm_come_from_its_cache(small: Make, caches: Path) -> None:
    _, theirs, path = of_timm(caches)
    folder = caches / "hub" / "models--timm--test_vit.r160_in1k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    path.rename(folder / "snapshots" / ("0" * 40) / "model.safetensors")
    config = small(network="timm:test_vit.r160_in1k", image_size=32, pretrained=True)
    given = Experiment(config).initial_weights()
    plain = Experiment(config.replaced({"pretrained": False})).initial_weights()
    assert torch.equal(given["body.cls_token"], theirs["cls_token"])
    assert torch.equal(given["output.weight"], plain["output.weight"])


def test_published_weights_of_torchvision_come_from_its_cache(small: Make, caches: Path) -> None:
    theirs = import_torchvision().models.mobilenet_v3_small(num_classes=7).state_dict()
    (caches / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    written(caches / "torch" / "hub" / "checkpoints" / "mobilenet_v3_small-047dcff4.pth", theirs)
    of = {"network": "mobilenet-v3-small", "width": 16, "stem": "imagenet", "image_size": 32}
    experiment = Experiment(small(**of, pretrained=True))
    given = experiment.initial_weights()
    assert torch.equal(given["body.0.0.weight"], theirs["features.0.0.weight"])
    assert experiment.normalisation[0] == (0.485, 0.456, 0.406) != Experiment(small(**of)).normalisation[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"network": "timm:test_vit.r160_in1k", "image_size": 32},
            "'timm:test_vit.r160_in1k': .*HF_HOME.*weights-file",
        ),
        ({"network": "resnet18", "width": 64, "stem": "imagenet"}, "not known.*TORCH_HOME .*weights-file"),
        ({"network": "resnet18", "width": 8}, "width = 8 and stem = 'cifar': must be width = 64 and stem = 'imagenet'"),
        ({"network": "cnn"}, "'cnn', which has no published weights: must be false, or network resnet18, "),
        ({"weights_file": "a.pth"}, "pretrained = true with weights-file.*must be false, or trainable = 'lora'"),
        ({"method": "tfcl"}, "pretrained = true with method = 'tfcl', which sends no weights: must be false"),
    ],
)
def test_a_run_that_cannot_have_published_weights_ends_before_it_begins(
    small: Make, caches: Path, keys: dict[str, Any], message: str
) -> None:
    if "timm" in str(keys):
        need_modules("timm")
    with pytest.raises(ConfigError, match=message) as refusal:
        run_inline(small(**keys, pretrained=True))
    assert "\n" not in str(refusal.value) and not (caches / "run").exists()


def adapted(rank: int) -> Network:
    net = network()
    freeze(net, "lora", rank, torch.Generator().manual_seed(1))
    return net


PEFTS = {"peft_type": "LORA", "lora_alpha": 6, "r": 2, "init_lora_weights": True, "loftq_config": {}, "bias": "none"}


def of_peft(path: Path, **told: object) -> tuple[Weights, Path]:
    """Adapters of rank 2 of two layers and a whole output layer, as peft names them for torchvision's ResNet-18."""
    draw = torch.Generator().manual_seed(3)
    halves = {
        "layer1.0.conv1.lora_A": (2, 4, 3, 3),
        "layer1.0.conv1.lora_B": (4, 2, 1, 1),
        "layer2.0.downsample.0.lora_A.default": (2, 4, 1, 1),
        "layer2.0.downsample.0.lora_B.default": (8, 2, 1, 1),
        "fc": (7, 32),
    }
    stored = {f"base_model.model.{name}.weight": torch.randn(shape, generator=draw) for name, shape in halves.items()}
    path.with_name("adapter_config.json").write_text(json.dumps({**PEFTS, **told}))
    return stored, written(path, stored)


@pytest.mark.parametrize(("told", "factor"), [({}, 3.0), ({"use_rslora": True}, 6 / 2**0.5)])
def test_adapters_of_peft_fit_by_the_names_of_their_network(
    tmp_path: Path, told: dict[str, object], factor: float
) -> None:
    stored, path = of_peft(tmp_path / "adapter_model.safetensors", **told)
    found = weights_for(adapted(4), path)
    layer = "blocks.0.conv1.weight"
    assert {name.partition("_lora")[0] for name in found} == {layer, "blocks.2.shortcut.0.weight"}
    a, b = (stored[f"base_model.model.layer1.0.conv1.lora_{half}.weight"] for half in "AB")
    wanted = factor * torch.einsum("ir,rchw->ichw", b[:, :, 0, 0], a)
    assert torch.allclose((found[f"{layer}_lora_up"] @ found[f"{layer}_lora_down"]).view(4, 4, 3, 3), wanted, atol=1e-5)
    body = {
        f"base_model.model.{name}".replace(".conv1.w", ".conv1.base_layer.w"): each
        for name, each in network(5).state_dict().items()
    }
    both = weights_for(adapted(4), written(path, {**stored, **body}))
    assert (
        both.keys()
        == found.keys() | weights_for(network(), written(tmp_path / "own.pth", network().state_dict())).keys()
    )
    assert torch.equal(both[layer], network(5).state_dict()[layer]) and torch.equal(
        both[f"{layer}_lora_up"], found[f"{layer}_lora_up"]
    )


def test_adapters_of_peft_fit_a_network_of_timm(tmp_path: Path) -> None:
    net, _, _ = of_timm(tmp_path)
    freeze(net, "lora", 2, torch.Generator())
    halves = {"lora_A": torch.ones(2, 64), "lora_B": torch.ones(192, 2)}
    stored = {f"base_model.model.blocks.1.attn.qkv.{half}.weight": each for half, each in halves.items()}
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFTS))
    head = {"base_model.model.head.weight": torch.ones(7, 64)}
    found = weights_for(net, written(tmp_path / "adapter_model.safetensors", {**stored, **head}))
    assert set(found) == {f"body.blocks.1.attn.qkv.weight_lora_{half}" for half in ("down", "up")}


def _peft_named(part: str, value: Tensor) -> Callable[[Weights], Weights]:
    return lambda stored: {**stored, f"base_model.model.{part}.weight": value}


@pytest.mark.parametrize(
    ("change", "told", "rank", "message"),
    [
        (dict, None, 4, r"adapters of peft.*adapter_config\.json.*No such file"),
        (dict, {"use_dora": True}, 4, r"adapter_config\.json' sets use_dora; must be of plain LoRA"),
        (dict, {"init_lora_weights": "pissa"}, 4, r"init_lora_weights; must be"),
        (dict, {"lora_alpha": "much"}, 4, r"adapter_config\.json' is none of peft's"),
        (
            dict,
            {},
            1,
            r"rank of 'base_model\.model\.layer1\.0\.conv1\.lora_A\.weight' is 2; must be 1 to 1 .*lora-rank",
        ),
        (dict, {}, 0, "which the network has not; must be without adapters, or trainable 'lora'"),
        (
            _peft_named("layer1.0.conv2.lora_A", torch.ones(2, 4, 3, 3)),
            {},
            4,
            r"conv2\.lora_A\.weight' alone; must hold both",
        ),
        (
            _peft_named("layer1.0.conv1.lora_B", torch.ones(3, 2)),
            {},
            4,
            r"conv1\.lora_B\.weight' is \(3, 2\), must be \(4, 2\)",
        ),
        (
            _peft_named("layer1.0.conv1.lora_B", torch.ones(4, 2).to_sparse()),
            {},
            4,
            r"is torch\.float32, torch\.sparse",
        ),
        (_peft_named("layer1.0.conv1.lora_B", torch.tensor(1.0)), {}, 4, r"conv1\.lora_B\.weight' is \(\), must be"),
        (
            _peft_named("decoder.lora_A", torch.ones(2, 4)),
            {},
            4,
            r"the adapter 'base_model\.model\.decoder\.lora_A\.weight'",
        ),
        (_peft_named("layer1.0.bn1", torch.ones(4)), {}, 4, "lacks 'stem.0.weight'"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[Weights], Weights], told: dict[str, object] | None, rank: int, message: str
) -> None:
    stored, path = of_peft(tmp_path / "adapters.pt", **(told or {}))
    written(path, change(stored))
    if told is None:
        (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=f"weights-file = .*{message}") as refusal:
        weights_for(adapted(rank) if rank else network(), path)
    assert "\n" not in str(refusal.value)


def test_a_run_starts_from_adapters_on_a_drawn_or_a_published_body(small: Make, caches: Path) -> None:
    layer = "body.0.0.weight"
    of = {"network": "mobilenet-v3-small", "width": 16, "stem": "imagenet", "image_size": 32, "trainable": "lora"}
    drawn = Experiment(small(**of))
    halves = {f"{layer}_lora_down": torch.ones(2, 27), f"{layer}_lora_up": torch.ones(16, 2)}
    path = written(caches / "adapters.safetensors", halves)
    given = Experiment(small(**of, weights_file=str(path)))
    first, plain = given.initial_weights(), drawn.initial_weights()
    assert torch.equal(first[f"{layer}_lora_down"][:2], torch.ones(2, 27)), "the file's rank"
    assert torch.equal(first[f"{layer}_lora_down"][2:], plain[f"{layer}_lora_down"][2:]), "the rest as without it"
    assert torch.equal(first[f"{layer}_lora_up"], torch.eye(2, 4).sum(0).expand(16, 4))
    assert given.frozen_digest == drawn.frozen_digest
    theirs = import_torchvision().models.mobilenet_v3_small(num_classes=7).state_dict()
    (caches / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    published = written(caches / "torch" / "hub" / "checkpoints" / "mobilenet_v3_small-047dcff4.pth", theirs)
    both = Experiment(small(**of, pretrained=True, weights_file=str(path)))
    assert torch.equal(both.initial_weights()[layer], theirs["features.0.0.weight"])
    assert torch.equal(both.initial_weights()[f"{layer}_lora_up"], first[f"{layer}_lora_up"])
    whole = small(**of, pretrained=True, weights_file=str(published))
    with pytest.raises(ConfigError, match=r"pretrained = true with weights-file = .*more than adapters: must be false"):
        run_inline(whole)


def _without(name: str) -> Callable[[Weights], Any]:
    return lambda weights: {key: each for key, each in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("blocks.0.conv1.weight"), r"lacks 'blocks\.0\.conv1\.weight'; must hold all layers"),
        (lambda w: {**w, "decoder.weight": torch.ones(2)}, r"holds 'decoder\.weight', which the network has not"),
        (
            lambda w: {**w, "conv1.weight": w["stem.0.weight"].clone()},
            r"holds '.*\.weight', the network's 'stem\.0\.weight', twice",
        ),
        (
            lambda w: {**w, "stem.0.weight": torch.ones(8, 3, 3, 3)},
            r"shape of 'stem\.0\.weight' is \(8, 3, 3, 3\), must be \(4, 3, 3, 3\) \(see width and stem\)",
        ),
        (lambda w: {**w, "stem.1.bias": torch.ones(4, dtype=torch.int64)}, r"'stem\.1\.bias' is torch\.int64"),
        (lambda w: {**w, "stem.1.bias": torch.full((4,), torch.nan)}, r"'stem\.1\.bias' holds values that are not"),
        (lambda w: {**w, "stem.1.running_var": -torch.ones(4)}, r"'stem\.1\.running_var' holds .* negative"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[Weights], Weights], message: str) -> None:
    path = written(tmp_path / "weights.safetensors", change(dict(network().state_dict())))
    with pytest.raises(ConfigError, match=message) as refusal:
        weights_for(network(), path)
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith(f"weights-file = {str(path)!r}: ")


class _Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


def _archive(size: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * size)
    return file.getvalue()


def test_hostile_files_run_nothing_and_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights_file, "LARGEST", 1 << 20)
    torch.save({"stem.0.weight": _Harm()}, tmp_path / "code.pth")
    torch.save([torch.ones(2)], tmp_path / "list.pth")
    torch.save({"stem.0.weight": {"deeper": torch.ones(2)}}, tmp_path / "nested.pth")
    (tmp_path / "pickle.pth").write_bytes(pickle.dumps({"stem.0.weight": _Harm()}))
    (tmp_path / "bomb.pth").write_bytes(_archive(2 << 20))
    (tmp_path / "zeros.pth").write_bytes(_archive(1000))
    of_the_future = bytearray(_archive(1000))
    of_the_future[of_the_future.index(b"PK\1\2") + 6] = 0xFF  # the version of the format that its reader needs
    (tmp_path / "version.pth").write_bytes(of_the_future)
    (tmp_path / "large.safetensors").write_bytes(b"\0" * ((1 << 20) + 1))
    (tmp_path / "header.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "weights.npz").write_bytes(b"")
    (tmp_path / "folder.pth").mkdir()
    for name, message in {
        "code.pth": "holds more than names and tensors",
        "list.pth": "must hold a state dict",
        "nested.pth": "must hold a state dict",
        "pickle.pth": "was not written by torch.save",
        "bomb.pth": "unpacks to 2097152 bytes; at most 1048576 are read",
        "zeros.pth": "is damaged",
        "version.pth": "is damaged, or was not written by torch.save",
        "large.safetensors": "at most 1048576 are read",
        "header.safetensors": "is damaged, or no file of safetensors",
        "empty.safetensors": "is damaged, or no file of safetensors",
        "weights.npz": r"must be a file \.safetensors, \.pth or \.pt",
        "folder.pth": "it is not a regular file",
        "missing.pth": "cannot be read .No such file",
    }.items():
        with pytest.raises(ConfigError, match=message) as refusal:
            weights_for(network(), tmp_path / name)
        assert "\n" not in str(refusal.value)
    assert not (tmp_path / "harmed").exists()


def test_a_run_starts_from_the_file_with_an_output_layer_of_its_own(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads it, once, and no client does."""
    path = written(tmp_path / "weights.safetensors", network(9).state_dict())
    config = small(weights_file=str(path), rounds=1, clients=2)
    plain, given = Experiment(small()).initial_weights(), Experiment(config).initial_weights()
    assert torch.equal(given["output.weight"], plain["output.weight"])
    assert torch.equal(given["stem.0.weight"], network(9).state_dict()["stem.0.weight"])
    reads: list[Path] = []

    def noted(path: Path, most: int) -> bytes:
        reads.append(path)
        return read_bytes(path, most)

    monkeypatch.setattr(weights_file, "read_bytes", noted)
    run_inline(config)
    assert reads == [path]
    folder = tmp_path / "run"
    kept = Checkpoints(folder / "server").newest()
    assert rounds_of(folder)[0]["failures"] == [] and kept is not None
    moved = torch.from_numpy(kept.weights["stem.0.weight"]) - given["stem.0.weight"]
    assert 0 < moved.abs().max() < 0.2  # a few steps of 0.01 from there


def test_clients_do_not_read_the_file(small: Make, tmp_path: Path) -> None:
    """A device may not have it, and a server should not choose what a device reads."""
    experiment = Experiment(small(weights_file=str(tmp_path / "on-the-server.pth")))
    weights = network(1).state_dict()
    assert torch.equal(experiment.network(weights).state_dict()["stem.0.weight"], weights["stem.0.weight"])
    assert list(experiment.weight_shapes) == list(weights)


def test_a_file_that_does_not_fit_ends_a_run_before_it_begins(small: Make, tmp_path: Path) -> None:
    path = written(tmp_path / "weights.pth", seeded_resnet18(10, 2, "cifar", 0).state_dict())
    with pytest.raises(ConfigError, match=r"must be \(4, 3, 3, 3\) "):
        run_inline(small(weights_file=str(path)))
    assert not (tmp_path / "run").exists()


def test_a_method_that_sends_no_weights_refuses_a_file(small: Make) -> None:
    with pytest.raises(ConfigError, match=r"weights-file = 'a\.pth' with method = 'tfcl', which sends no weights"):
        run_inline(small(method="tfcl", weights_file="a.pth"))
