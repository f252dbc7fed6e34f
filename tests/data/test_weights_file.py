"""Weights to start from: files that fit, and files that others may have made to harm."""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_of
from support.common import rounds_of
from support.made.networks import seeded_resnet18
from torch import Tensor

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.config import Config
from fedkace_flwr.data import weights_file
from fedkace_flwr.data.weights_file import weights_for
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.networks.catalogue import built
from fedkace_flwr.networks.network import Blueprint, Network
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
