"""The command ``predict``, as a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.common import SMALL
from support.made.models import constant, picture
from support.systems.service import ENVIRONMENT, ROOT, predict

from fedkace_flwr.experiments.__main__ import main as program
from fedkace_flwr.export.folder import write_folder
from fedkace_flwr.inference.predict import main


@pytest.mark.slow
def test_the_command_names_what_pictures_show_and_says_what_failed(folder: Path, tmp_path: Path) -> None:
    for name, content in (
        ("a.png", picture()),
        ("b.jpg", picture("JPEG", (300, 200))),
        ("broken.png", picture()[:200]),
    ):
        (tmp_path / name).write_bytes(content)
    images = [tmp_path / name for name in ("a.png", "broken.png", "missing.png", "b.jpg")]
    done = predict("--state", folder, *images, "--top", 2)
    assert done.returncode == 2
    head, first, second = done.stdout.splitlines()
    assert head == "global model of round 3, 3 of 10 classes met"
    assert re.fullmatch(rf"{tmp_path}/a\.png: class 3 9\d\.\d\d %, class 4 \d\.\d\d %", first)
    assert second.startswith(f"{tmp_path}/b.jpg: class 3 ")
    broken, missing = done.stderr.splitlines()
    assert broken.startswith(f"error: {tmp_path}/broken.png: it is damaged (")
    assert missing == f"error: {tmp_path}/missing.png: No such file or directory"

    done = predict("--state", folder, *images, "--json", "--top", 9)
    assert done.returncode == 2
    said = json.loads(done.stdout)
    assert said["model"]["seen"] == ["class 1", "class 3", "class 4"] and said["model"]["round"] == 3
    answers = {Path(each["image"]).name: each for each in said["answers"]}
    assert list(answers) == ["a.png", "broken.png", "missing.png", "b.jpg"]
    assert [each["class"] for each in answers["a.png"]["classes"]] == ["class 3", "class 4", "class 1"]
    assert sum(each["probability"] for each in answers["a.png"]["classes"]) == pytest.approx(1)
    assert "damaged" in answers["broken.png"]["error"] and "classes" not in answers["broken.png"]


def test_the_command_without_a_model_says_so_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "empty").mkdir()
    expected = {
        tmp_path / "nowhere": "there is no such folder",
        tmp_path / "empty": "there is no model yet",
        tmp_path: "name one of the folders in it: client",
    }
    for state, text in expected.items():
        assert main(["--state", str(state), str(tmp_path / "a.png")]) == 2
        said = capsys.readouterr()
        assert said.out == "" and len(said.err.splitlines()) == 1
        assert said.err.startswith(f"error: {state}: ") and text in said.err
    assert main(["serve", "--state", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1 and "there is no such folder" in said.err


def test_an_exported_model_predicts_like_the_one_that_a_client_keeps(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    model = tmp_path / "run" / "model"
    write_folder(model, constant(3, 3, seen=(1, 3, 4)))
    (tmp_path / "a.png").write_bytes(picture())
    said = []
    for option, state in (("--model", model), ("--state", folder)):
        assert main([option, str(state), str(tmp_path / "a.png"), "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out)["answers"])
    assert said[0] == said[1] and said[0][0]["classes"][0]["class"] == "class 3"
    assert main(["--state", str(tmp_path / "run"), "a.png"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path}/run: there is no model yet; name one of the folders in it: model"
    (model / "model.safetensors").write_bytes(b"half of it")
    assert main(["--model", str(model), "a.png"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {model}/model.safetensors: it is damaged, or no file of safetensors"


@pytest.mark.parametrize("command", ["predict", "serve"])
def test_what_the_parser_refuses_is_one_line_that_names_the_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    images = ["a.png"] if command == "predict" else []
    for arguments, text in (
        (["--state", ".", "--threads", "0"], "argument --threads: '0': must be a whole number from 1 to 1000000"),
        (["--threads", "1"], "the following arguments are required: --state/--model"),
        (["--state", ".", *images, "--tpo"], "unrecognized arguments: --tpo"),
    ):
        assert program([command, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {command}: {text}") and line.endswith(f"{command} --help")
    assert main(["--state", ".", "a.png", "--top", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: predict: argument --top: '0': must be a whole number from 1 to 1000000; see "
        "python -m fedkace_flwr.inference.predict --help"
    )


def test_a_folder_of_another_user_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    for arguments in (["--state", str(folder), "a.png"], ["serve", "--state", str(folder)]):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"error: {folder}: this user may not read it; must be a folder in the SuperNode's models-dir"
        )


@pytest.mark.slow
def test_the_command_loads_neither_flower_nor_ray_nor_torchvision() -> None:
    code = "import sys, fedkace_flwr.inference.predict; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert not {"flwr", "ray", "torchvision", "sklearn", "starlette", "uvicorn"} & set(done.stdout.split())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_answers_while_rounds_go_on(tmp_path: Path) -> None:
    """A run in a process of its own; the command is called again and again until the run is over."""
    config = {**SMALL, "rounds": 5, "results-dir": str(tmp_path), "run-name": "run", "keep-models": "always"}
    (tmp_path / "a.png").write_bytes(picture())
    folder = tmp_path / "run" / "clients" / "client-001"
    program = "from fedkace_flwr.experiments.running.inline import Config, run_inline; run_inline(Config.parse({!r}))"
    command = [sys.executable, "-c", program.format(config)]
    said: list[dict[str, Any]] = []
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as run:
        while (over := run.poll()) is None:
            done = predict("--state", folder, tmp_path / "a.png", "--json")
            if done.returncode:
                assert not said, done.stderr  # once there is a model, there always is one
                assert "there is no such folder" in done.stderr or "there is no model yet" in done.stderr
            else:
                said.append(json.loads(done.stdout))
    assert over == 0
    said.append(json.loads(predict("--state", folder, tmp_path / "a.png", "--json").stdout))
    rounds = [each["model"]["round"] for each in said]
    assert rounds == sorted(rounds) and rounds[-1] == 5
    for each in said:
        assert {one["class"] for one in each["answers"][0]["classes"]} <= set(each["model"]["seen"])
