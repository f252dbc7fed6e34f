"""``fedkace export``: models from runs, from clients and from other models, and what it refuses."""

import base64
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.common import SMALL
from support.made.models import CLASSES, constant
from support.tools import need_modules

from fedkace_flwr import load_model
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.inference import model_files as serving
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.checkpoint import Checkpoint

Make = Callable[..., Config]
IMAGES = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
FILES = [".fedkace", "README.md", "config.json", "model.safetensors"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["export", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose clients kept their models."""
    results = tmp_path_factory.mktemp("exported")
    run_inline(Config.parse({**SMALL, "results-dir": str(results), "run-name": "run", "keep-models": "always"}))
    return results / "run"


@pytest.mark.slow
def test_a_finished_run_gives_the_model_that_it_left(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "taken")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'taken'}, the global model of round 3\n"
    assert names(tmp_path / "taken") == FILES
    for name in FILES:
        assert (tmp_path / "taken" / name).read_bytes() == (run / "model" / name).read_bytes()
    assert main(["export", str(tmp_path / "taken"), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "README.md").read_bytes() == (run / "model" / "README.md").read_bytes()


@pytest.mark.slow
def test_adapters_come_along_from_a_run_its_checkpoint_and_an_export(small: Make, tmp_path: Path) -> None:
    run_inline(small(trainable="lora"))
    left = (tmp_path / "run" / "model" / "adapters.safetensors").read_bytes()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "taken")]) == 0
    assert main(["export", str(tmp_path / "taken"), str(tmp_path / "again")]) == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "unfinished")]) == 0
    for folder in ("taken", "again", "unfinished"):
        assert (tmp_path / folder / "adapters.safetensors").read_bytes() == left


def test_an_unfinished_run_gives_the_model_of_its_last_checkpoint(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunFolder.save

    def cut(self: RunFolder, checkpoint: Checkpoint) -> None:
        save(self, checkpoint)
        raise SystemExit

    monkeypatch.setattr(RunFolder, "save", cut)
    with pytest.raises(SystemExit):
        run_inline(small(rounds=5))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "taken")]) == 0
    model = load_model(tmp_path / "taken")
    assert model.round == 1 and 2 <= len(model.classes_met) <= 6
    assert "round 1 of 5" in (tmp_path / "taken" / "README.md").read_text()


def test_a_client_gives_what_it_answers_with(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = run / "clients" / "client-001"
    assert main(["export", str(client), str(tmp_path / "taken")]) == 0
    assert "model of round 3" in capsys.readouterr().out
    wanted = serving.load_newest(client).probabilities(IMAGES).numpy()
    assert np.array_equal(load_model(tmp_path / "taken").predict(IMAGES).probabilities, wanted)
    assert "what one client of the federation answers with" in (tmp_path / "taken" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedframe", "mirroring": "allowed"},
        {"method": "dcfcl"},
        {"method": "lkc"},
    ],
    ids=lambda changes: changes["method"],
)
def test_clients_that_answer_by_several_models_or_their_own_give_them(
    small: Make, tmp_path: Path, changes: dict[str, object]
) -> None:
    run_inline(small(rounds=2, clients=2, keep_models="always", **changes))
    client = tmp_path / "run" / "clients" / "client-000"
    assert main(["export", str(client), str(tmp_path / "taken")]) == 0
    wanted = serving.load_newest(client).probabilities(IMAGES).numpy()
    assert np.array_equal(load_model(tmp_path / "taken").predict(IMAGES).probabilities, wanted)


def test_encrypted_models_of_a_client_need_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = tmp_path / "client-000"
    with monkeypatch.context() as patch:
        patch.setenv(encryption.VARIABLE, base64.b64encode(bytes(range(32))).decode())
        serving.write(client, constant(4, 2))
        assert main(["export", str(client), str(tmp_path / "taken")]) == 0
        assert load_model(tmp_path / "taken").predict(IMAGES).labels == ["class 2"] * 6
    assert "encrypted" in refused(capsys, client, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_onnx_is_checked_and_an_older_one_does_not_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_modules("onnx", "onnxscript", "onnxruntime")
    target = tmp_path / "taken"
    serving.write(tmp_path / "client", constant(1, 2))
    assert main(["export", str(tmp_path / "client"), str(target), "--onnx"]) == 0
    assert "model.onnx: checked with onnxruntime; probabilities differ by at most" in capsys.readouterr().out
    assert names(target) == sorted([*FILES, "model.onnx"]) and "`model.onnx`" in (target / "README.md").read_text()
    assert main(["export", str(target), str(tmp_path / "copy")]) == 0
    assert names(tmp_path / "copy") == FILES and "model.onnx" not in (tmp_path / "copy" / "README.md").read_text()
    serving.write(tmp_path / "client", constant(2, 3))
    assert main(["export", str(tmp_path / "client"), str(target)]) == 0
    assert names(target) == FILES and "`model.onnx`" not in (target / "README.md").read_text()


def test_a_missing_package_is_answered_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.write(tmp_path / "client", constant(1, 2))
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)
    line = refused(capsys, tmp_path / "client", tmp_path / "taken", "--onnx")
    assert line == "error: --onnx: onnx and onnxscript must be installed: pip install 'fedkace-flwr[onnx]'"
    assert not (tmp_path / "taken").exists()


def test_what_holds_no_model_is_refused_in_one_line(
    run: Path, small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "taken"
    assert "nowhere: there is no such folder; must be that of a run" in refused(capsys, tmp_path / "nowhere", target)
    assert "is the folder of a study; name that of a run in it, such as run" in refused(capsys, run.parent, target)
    assert "there is no model yet" in refused(capsys, tmp_path, target)
    config = small(method="tfcl")
    RunFolder(tmp_path / "run").begin(config, torch.device("cpu"), "token")
    assert "method = 'tfcl' has no global model, since its clients send no weights" in refused(
        capsys, tmp_path / "run", target
    )
    RunFolder(tmp_path / "new").begin(small(), torch.device("cpu"), "token")
    assert "has no checkpoint in server/; no round has been finished" in refused(capsys, tmp_path / "new", target)
    (tmp_path / "new" / "config.json").write_text('{"epochs": "many"}')
    assert "new/config.json: epochs = 'many'" in refused(capsys, tmp_path / "new", target)
    assert not target.exists()


def test_a_folder_with_other_things_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serving.write(tmp_path / "client", constant(1, 2))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own")
    for target in (tmp_path / "mine", tmp_path / "mine" / "README.md"):
        assert str(target) in refused(capsys, tmp_path / "client", target)
    assert (tmp_path / "mine" / "README.md").read_text() == "my own"
    (tmp_path / "file").write_text("")
    assert "cannot be written (" in refused(capsys, tmp_path / "client", tmp_path / "file" / "in")


def test_data_that_are_needed_and_gone_are_asked_for(
    small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(dataset="cifar100", data_dir=str(tmp_path / "gone"), capacity=100)
    folder = RunFolder(tmp_path / "run")
    folder.begin(config, torch.device("cpu"), "token")
    weights = constant(1, 2).weights["global"]
    folder.save(Checkpoint(1, "1", weights))
    folder.close()
    assert len(weights["output.bias"]) == CLASSES
    line = refused(capsys, tmp_path / "run", tmp_path / "taken")
    assert "dataset = 'cifar100'" in line and "name its folder with --data-dir" in line
    assert "is missing" in refused(capsys, tmp_path / "run", tmp_path / "taken", "--data-dir", tmp_path / "gone")
