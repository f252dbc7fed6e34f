"""The model that a finished run leaves: its files, what they say, and the runs that leave none."""

import base64
import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from support.common import SMALL
from support.made.arrays import SERIES, write_arrays
from support.made.models import constant

from fedkace_flwr.config import Config
from fedkace_flwr.data.weights_file import weights_for
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.export.card import Training, card
from fedkace_flwr.export.folder import write_folder
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.storage.names import printable

Make = Callable[..., Config]
FILES = [".fedkace", "README.md", "config.json", "model.safetensors"]
HOSTILE = [
    "<script>alert(1)</script>",
    "[x](javascript:alert(1)) ![y](https://evil.example/y.png) https://evil.example www.evil.example",
    "`code` **bold** ~~no~~ | cell | $x$",
    "a\n\n# heading\n---\n\r\x1b[31m\u2028b",
    "\ud800 half",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    results = tmp_path_factory.mktemp("left")
    run_inline(Config.parse({**SMALL, "results-dir": str(results), "run-name": "run"}))
    return results / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_it_is_the_global_model_after_the_last_round(run: Path) -> None:
    assert sorted(content(run / "model")) == FILES
    kept = Checkpoints(run / "server").newest()
    left = load_file(run / "model" / "model.safetensors")
    assert kept is not None and set(left) == set(kept.weights)
    assert all(torch.equal(tensor, torch.from_numpy(kept.weights[name])) for name, tensor in left.items())


def test_its_metadata_are_strings_that_say_how_to_use_it(run: Path) -> None:
    with safe_open(run / "model" / "model.safetensors", "np") as file:
        told = file.metadata()
    assert told["format"] == "pt" and told["network"] == "resnet18" and told["width"] == "4"
    assert json.loads(told["class_names"]) == [str(digit) for digit in range(10)]
    described = json.loads((run / "model" / "config.json").read_text())
    for name in ("mean", "std", "image_size", "classes_met", "answers"):
        assert json.loads(told[name]) == described[name]
    assert described["id2label"]["7"] == "7" and described["round"] == 3
    # Of ten classes, three clients meet at most four each in three rounds.
    assert 4 <= len(described["classes_met"]) <= 10


def test_another_run_can_start_from_it(run: Path) -> None:
    config = Config.parse({**SMALL, "seed": 8, "weights-file": str(run / "model" / "model.safetensors")})
    started = Experiment(config).initial_weights()
    left = load_file(run / "model" / "model.safetensors")
    taken = [name for name in left if not name.startswith("output.") and "num_batches" not in name]
    assert taken and all(torch.equal(started[name], left[name]) for name in taken)
    assert set(weights_for(Experiment(config).network_on_cpu(), Path(config.model.weights_file))) == set(taken)


def test_the_same_run_leaves_the_same_bytes_also_when_it_ended_before_its_summary(
    run: Path, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = RunFolder.finish

    def cut(self: RunFolder, *arguments: object, **options: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "_write", lambda *_: (_ for _ in ()).throw(SystemExit))
            return finish(self, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(RunFolder, "finish", cut)
        run_inline(small())
    folder = Path(small().run.results_dir) / "run"
    assert not (folder / "summary.json").exists() and sorted(content(folder / "model")) == FILES
    (folder / "model" / "README.md").unlink()
    run_inline(small(resume=True))
    assert (folder / "summary.json").exists()
    assert content(folder / "model") == content(run / "model")


def test_a_model_that_cannot_be_written_is_told_and_the_run_can_be_finished_later(small: Make) -> None:
    folder = Path(small().run.results_dir) / "run"
    RunFolder(folder).close()
    (folder / "model").write_text("in the way")
    with pytest.raises(ConfigError, match=r"model: cannot be written \(Not a directory\)"):
        run_inline(small(rounds=1))
    assert not (folder / "summary.json").exists()
    (folder / "model").unlink()
    run_inline(small(rounds=1, resume=True))
    assert (folder / "summary.json").exists() and sorted(content(folder / "model")) == FILES


def test_the_card_says_what_the_run_was(run: Path) -> None:
    text = (run / "model" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    told = yaml.safe_load(head)
    assert told["library_name"] == "fedkace-flwr" and "fedkace" in told["tags"] and "resnet18" in told["tags"]
    summary = json.loads((run / "summary.json").read_text())
    assert f"(AA) | {100 * summary['average_accuracy']:.2f} % |" in body
    assert f"after the last round | {100 * summary['final_accuracy']:.2f} % |" in body
    for part in ("fedkace on digits, round 3", "CC BY 4.0", "Apache-2.0", "`samples-per-class` | 8 |", "load_model"):
        assert part in body
    assert str(run.parent) not in text and "results-dir" not in text


@pytest.mark.parametrize("name", HOSTILE)
def test_texts_of_others_stay_texts_in_the_card(name: str) -> None:
    agreed = " ".join(printable(name).split())
    config = Config.parse({"dataset": "inbox", "image-size": 8, "class-names": f"{agreed.replace(',', ';')}, b"})
    text = card(constant(2, 1, class_names=(name, *map(str, range(9)))), Training(config, []))
    plain = card(constant(2, 1, class_names=tuple(map(str, range(10)))), Training(config, []))
    assert len(text.splitlines()) == len(plain.splitlines())
    (row,) = [line for line in text.splitlines() if line.startswith("| 0 | ")]
    (key,) = [line for line in text.splitlines() if line.startswith("| `class-names` | ")]
    for line, cells in ((row, 3), (key.replace("`class-names`", ""), 2)):
        assert len(re.findall(r"(?<!\\)\|", line)) == cells + 1 and line.isprintable()
        assert not re.search(r"(?<!\\)[<>`$\[]|(?<!\\)://|www(?<!\\)\.", line)


@pytest.mark.parametrize(
    ("keys", "hub", "said"),
    [
        ({"dataset": "cifar100"}, ["uoft-cs/cifar100"], "none stated by its author"),
        (
            {"dataset": "hub:owner/pictures@v1"},
            ["owner/pictures"],
            "owner/pictures on the Hugging Face Hub",
        ),
        ({"dataset": "folder"}, None, "unknown to the program; ask whoever provided them"),
    ],
)
def test_a_card_names_the_data_and_their_licence_as_far_as_they_are_known(
    keys: dict[str, object], hub: list[str] | None, said: str
) -> None:
    text = card(constant(2, 1), Training(Config.parse(keys), []))
    assert yaml.safe_load(text.split("---\n")[1]).get("datasets") == hub and said in text


def test_a_card_of_somebody_else_is_kept_and_says_whether_there_is_onnx(tmp_path: Path) -> None:
    for onnx, said in ((b"", 0), (b"some", 1), (b"other", 1), (b"", 0)):
        before = (tmp_path / "README.md").read_text() if (tmp_path / "README.md").exists() else "# My own\n"
        write_folder(tmp_path, constant(1, 2), text=before, onnx=onnx)
        text = (tmp_path / "README.md").read_text()
        assert text.startswith("# My own\n") and text.count("`model.onnx`") == said
        assert (tmp_path / "model.onnx").exists() == bool(onnx)


def test_a_card_says_which_classes_nobody_has_met_and_how_clients_used_the_model() -> None:
    config = Config.parse({"method": "er", "recalibrate-batchnorm": True, "predict-with": "mean"})
    text = card(constant(2, 1, seen=(1, 2)), Training(config, []))
    assert "never predicted: class 0, class 3" in text
    assert "`recalibrate-batchnorm = true`, `predict-with = mean`" in text


def test_a_card_counts_the_clients_that_joined_and_the_rounds_that_a_run_without_end_keeps() -> None:
    record = {"accuracy": 0.5, "chance": 0.1, "client_accuracy": [0.5] * 6, "global_accuracy": [0.5] * 6}
    told = {"rounds": 0, "clients": 4, "dataset": "inbox", "class-names": "a,b,c,d", "image-size": 8}
    text = card(constant(2, 1), Training(Config.parse(told), [{**record, "failures": []}] * 3))
    assert "| clients | 6 |" in text and "(6 of 6)" in text
    assert "average accuracy over the last 3 rounds (AA)" in text


def test_a_card_says_what_the_defence_did() -> None:
    rejected = {"client": 0, "phase": "training", "reason": "far", "kind": "direction"}
    record = {"accuracy": 0.5, "chance": 0.1, "failures": [rejected, rejected], "clipped_layers": [None, 3]}
    text = card(constant(2, 1), Training(Config(), [record]))
    assert "\n2 updates rejected, 1 clipped by the defence. " in text
    assert "defence" not in card(constant(2, 1), Training(Config(), [])).split("## Conf")[0]


def test_what_would_not_be_encrypted_or_could_not_predict_is_not_left(
    small: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run_inline(small(batchnorm_statistics="local", rounds=1, run_name="local"))
    assert (
        "no model is left: with batchnorm-statistics = 'local' the server has no batch-norm statistics" in caplog.text
    )
    monkeypatch.setenv(encryption.VARIABLE, base64.b64encode(bytes(range(32))).decode())
    run_inline(small(rounds=1, run_name="sealed"))
    assert "no model is left: FEDKACE_STATE_KEY is set, and the model would not be encrypted" in caplog.text
    for name in ("local", "sealed"):
        folder = Path(small().run.results_dir) / name
        assert (folder / "summary.json").exists() and not (folder / "model").exists()
    run_inline(small(batchnorm_statistics="local", network="cnn", rounds=1, run_name="plain", resume=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "network", "task"), [("wine", "mlp", "tabular-classification"), ("arrays", "cnn1d", None)]
)
def test_what_a_run_on_arrays_tells_speaks_of_no_images(
    dataset: str, network: str, task: str | None, small: Make, tmp_path: Path
) -> None:
    data = write_arrays(tmp_path / "data", SERIES)
    run_inline(small(dataset=dataset, data_dir=str(data), network=network, window=2, overlap=1))
    told = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "image" not in told.split("## Configuration")[0] and "predictor.predict(samples)" in told
    assert yaml.safe_load(told.split("---\n")[1]).get("pipeline_tag") == task
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert dataset in page and (tmp_path / "report" / "curves.png").exists()
