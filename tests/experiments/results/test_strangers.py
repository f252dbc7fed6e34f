"""Results that come from somebody else: what they name is not opened, links are not followed, wrong types are told."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.common import SMALL
from support.made.datasets import write_tree

from fedkace_flwr import load_model
from fedkace_flwr.config import Config, path_keys
from fedkace_flwr.errors import FedkaceError
from fedkace_flwr.experiments.export import export
from fedkace_flwr.experiments.report.robustness import honest_accuracies, robustness_tables
from fedkace_flwr.experiments.report.write import write_report
from fedkace_flwr.experiments.results.keep import keep
from fedkace_flwr.experiments.results.recorded import Recorded
from fedkace_flwr.experiments.results.summary_table import find_runs, summary_table
from fedkace_flwr.experiments.running.inline import run_inline

Command = Callable[[Path, Path], object]

SECRET = "a private key"
FILES = ("config.json", "environment.json", "rounds.jsonl", "summary.json", "study.json")
COMMANDS: dict[str, Command] = {
    "table": lambda study, out: summary_table(find_runs([study])[0], 200),
    "report": lambda study, out: write_report([study], out / "report"),
    "robustness": lambda study, out: robustness_tables(honest_accuracies(study)),
    "keep": lambda study, out: keep(study, out / "kept"),
    "keep one": lambda study, out: keep(study / "done", out / "one"),
    "export": lambda study, out: export(study / "done", out / "model"),
    "export unfinished": lambda study, out: export(study / "cut", out / "unfinished"),
}

opened: list[str] = []
"""What has been opened or listed in this process since the list was last cleared."""


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | Path):
        opened.append(str(arguments[0]))


sys.addaudithook(_note)


def opened_in(folder: Path) -> list[str]:
    return [path for path in opened if Path(path).resolve().is_relative_to(folder)]


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {k.replace("_", "-"): v for k, v in values.items()}))


def made_study(folder: Path, **config: Any) -> Path:
    """A study as of `poisoning`: a finished run, and one that is not; both have states, checkpoints and a model."""
    values = {**SMALL, **{key.replace("_", "-"): value for key, value in config.items()}}
    run_inline(Config.parse({**values, "results-dir": str(folder), "run-name": "done"}))
    shutil.copytree(folder / "done", folder / "cut")
    (folder / "cut" / "summary.json").unlink()
    change(folder / "cut" / "config.json", seed=8)
    labels = {"federation": "small", "aggregation": "default", "attack": "none"}
    runs = {"done": {**labels, "seed": 7}, "cut": {**labels, "seed": 8}}
    told = {"study": "poisoning", "title": None, "axes": [*labels, "seed"], "keys": {"attack": ["attack"]}}
    (folder / "study.json").write_text(json.dumps({**told, "runs": runs}))
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_study(tmp_path_factory.mktemp("good") / "study")


@pytest.fixture
def study(good: Path, tmp_path: Path) -> Path:
    """A study to spoil."""
    return Path(shutil.copytree(good, tmp_path / "study"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "private" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def texts(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes().decode("latin-1")


# Paths


@pytest.mark.slow
def test_no_path_that_a_record_names_is_opened(tmp_path: Path) -> None:
    """Only the folder of images that the caller names is, for the names of the classes."""
    private, images = tmp_path / "private", tmp_path / "private" / "images"
    for split in ("train", "val"):
        write_tree(images / split, ("cat", "dog", "eel"), 12)
    data = {"dataset": "folder", "data_dir": str(images), "image_size": 8, "num_classes": 3, "window": 2, "overlap": 1}
    study = made_study(tmp_path / "study", **data, samples_per_class=3, test_per_class=4)
    for run in ("done", "cut"):
        named = {key: str(private / key) for key in path_keys() - {"data-dir"}}
        change(study / run / "config.json", **named)
    shutil.copytree(study / "done" / "clients", private / "state-dir")
    for name, command in COMMANDS.items():
        opened.clear()
        if name == "export unfinished":
            with pytest.raises(FedkaceError, match="--data-dir"):
                command(study, tmp_path / "out")
        else:
            command(study, tmp_path / "out")
        assert opened_in(private) == [], name
    assert not (private / "cache-dir").exists()
    export(study / "cut", tmp_path / "out" / "unfinished", data_dir=images)
    assert load_model(tmp_path / "out" / "unfinished").class_names == ("cat", "dog", "eel")


@pytest.mark.slow
def test_no_path_of_the_machine_is_published(study: Path, tmp_path: Path) -> None:
    home = "/home/someone/My data"
    for run in ("done", "cut"):
        change(study / run / "config.json", **dict.fromkeys([*path_keys(), "on-alarm"], f"{home}/x"))
        change(study / run / "environment.json", platform=f"Linux, {home}/python", files={"weights-file": f"{home}/x"})
        path = study / run / "rounds.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        reason = f"inbox = {home}/inbox: '{home}/a b.png' cannot be read; see https://example.org/a/b"
        lines[1]["failures"] = [{"client": 1, "phase": "training", "reason": reason, "kind": "error"}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(study / "study.json", note=f"made with {home}/study.yaml")
    (study / "cut" / "clients" / "client-001" / "state-000003.npz").write_bytes(b"damaged")
    for name in ("report", "keep", "keep one", "export", "export unfinished"):
        COMMANDS[name](study, tmp_path / "out")
    wrong = [path for path, text in texts(tmp_path / "out") if "someone" in text or str(study) in text]
    assert wrong == []
    kept = Recorded(tmp_path / "out" / "kept").runs[1]
    told = "inbox = inbox: 'a b.png' cannot be read; see https://example.org/a/b"
    assert kept.name == "done" and kept.rounds()[1]["failures"][0]["reason"] == told
    table = pd.read_parquet(tmp_path / "out" / "kept" / "rounds.parquet")
    assert "someone" not in table.to_json() and told in str(table["failures"].tolist())


# Links


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES[:-1], "../study.json"])
def test_a_link_in_the_place_of_a_file_is_not_followed(name: str, study: Path, secret: Path, tmp_path: Path) -> None:
    path = (study / "done" / name).resolve()
    if path.suffix == ".json":
        secret.write_text(json.dumps(json.loads(path.read_text()) | {"note": SECRET}))
    path.unlink()
    path.symlink_to(secret)
    for command in COMMANDS.values():
        try:
            command(study, tmp_path / "out")
        except FedkaceError as error:
            assert f"{path}: is a link out of" in str(error) and "\n" not in str(error)
    assert [found for found, text in texts(tmp_path / "out") if SECRET in text] == []
    with pytest.raises(FedkaceError, match="is a link out of"):
        keep(study, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["done", "done/model", "cut/server", "cut/clients", "cut/clients/client-000"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(place: str, study: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    shutil.move(study / place, private)
    (study / place).symlink_to(private)
    opened.clear()
    for name, command in COMMANDS.items():
        if place == "done" and name in ("keep one", "export"):  # where the caller names the link
            continue
        try:
            command(study, tmp_path / "out")
        except FedkaceError as error:
            assert "is a link out of" in str(error) and "\n" not in str(error)
    assert opened_in(private) == []


def test_links_in_a_models_folder_are_not_followed(study: Path, secret: Path, tmp_path: Path) -> None:
    model = study / "done" / "model"
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(secret)
    with pytest.raises(FedkaceError, match=r"README\.md: is a link out of"):
        export(model, tmp_path / "out")
    shutil.move(model / "model.safetensors", secret)
    (model / "model.safetensors").symlink_to(secret)
    for folder in (model, str(model)):
        with pytest.raises(FedkaceError, match=r"model\.safetensors: .*link"):
            load_model(folder)
    named = Path(shutil.copy(secret, tmp_path / "named.safetensors"))
    (tmp_path / "link.safetensors").symlink_to(named)
    assert load_model(tmp_path / "link.safetensors").round == 3  # which the caller names


# Wrong types

VALUES: list[Any] = [
    None,
    True,
    -1,
    1.5,
    2**70,
    10**400,
    float("inf"),
    float("nan"),
    "x",
    "/",
    [],
    [None],
    [["x"]],
    {},
    {"x": []},
]


@st.composite
def spoilt(draw: st.DrawFn, good: Path) -> tuple[str, tuple[str | int, ...], Any]:
    """A file, a place in its JSON, or in that of its second line, and another value to put there."""
    name = draw(st.sampled_from([*(f"{run}/{file}" for run in ("done", "cut") for file in FILES[:3]), *FILES[3:]]))
    name = name if name != "summary.json" else "done/summary.json"
    value, place = content(good / name), list[str | int]()
    while isinstance(value, dict | list) and value and (not place or draw(st.booleans())):
        key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        place, value = [*place, key], value[key]
    return name, tuple(place), draw(st.sampled_from(VALUES))


def content(path: Path) -> Any:
    text = path.read_text()
    return json.loads(text.splitlines()[1] if path.suffix == ".jsonl" else text)


def put(path: Path, place: tuple[str | int, ...], value: Any) -> None:
    whole = within = content(path)
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    lines = path.read_text().splitlines()
    text = json.dumps(whole)
    path.write_text("\n".join([lines[0], text, *lines[2:], ""]) if path.suffix == ".jsonl" else text)


@pytest.mark.exhaustive
@pytest.mark.slow
@given(data=st.data())
def test_a_value_of_another_type_is_read_or_refused_in_one_line_with_file_and_field(
    good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name, place, value = data.draw(spoilt(good))
    folder = tmp_path_factory.mktemp("spoilt")
    study = Path(shutil.copytree(good, folder / "study"))
    put(study / name, place, value)
    for command in COMMANDS.values():
        try:
            command(study, folder / "out")
        except FedkaceError as error:
            assert "\n" not in str(error)
            differ = "its runs also differ in"  # of robustness, where a good value is another one
            assert any(file in str(error) for file in FILES) or differ in str(error)
    shutil.rmtree(folder)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("done/config.json", ("epochs",), None, "config.json: epochs = None: must be a whole number"),
        ("done/config.json", ("clients",), 4, "rounds.jsonl, line 1: is damaged; client_accuracy = "),
        ("done/environment.json", ("cores",), 10**400, "environment.json: is damaged; cores = "),
        ("done/summary.json", ("bytes", "up"), "x", "summary.json: is damaged; bytes.up = 'x'; must be a whole number"),
        ("done/rounds.jsonl", ("round",), 7, "rounds.jsonl, line 2: is damaged; round = 7; must be"),
        ("done/rounds.jsonl", ("accuracy",), float("nan"), "rounds.jsonl, line 2: is damaged; not valid JSON (NaN"),
        ("done/rounds.jsonl", ("gap",), [0.5], "line 2: is damaged; gap = [0.5]; must be numbers from 0 to 1"),
        ("done/rounds.jsonl", ("class_accuracy", 0), [0.5], "line 2: is damaged; class_accuracy = "),
        ("done/rounds.jsonl", ("failures",), [{"client": "x"}], "line 2, failures: is damaged; client = 'x'; must be"),
        ("study.json", ("axes",), ["seed", 3], "study.json: is damaged; axes = ['seed', 3]; must be a list of: a str"),
    ],
)
def test_the_file_and_the_field_are_named(
    name: str, place: tuple[str | int, ...], value: Any, words: str, study: Path, tmp_path: Path
) -> None:
    put(study / name, place, value)
    with pytest.raises(FedkaceError) as caught:
        for command in COMMANDS.values():
            command(study, tmp_path / "out")
    assert words in str(caught.value) and str(study) in str(caught.value)
