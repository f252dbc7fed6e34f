"""Study files by name, what YAML they may hold, and settings of the command line."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.tools import need_tools

from fedkace_flwr.config import Config, check_value
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.studies.inheritance import merged
from fedkace_flwr.experiments.studies.names import find_study, study_names
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.experiments.studies.yaml_file import parse_setting, read_yaml

ROOT = Path(__file__).parents[3]
STUDIES = ROOT / "fedkace_flwr" / "experiments" / "studies"


# Studies by name


def test_every_study_of_the_project_is_found_by_its_name() -> None:
    assert {"quickstart", "table1", "figure3"} <= set(study_names())
    assert "paper" not in study_names()  # a base, not a study
    for name in study_names():
        assert find_study(name).parent == STUDIES and find_study(name).exists()
    assert find_study("figure2") == find_study("table1")  # its runs


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("quickstart.yaml", "./quickstart", "some/folder/table1.yml", str(STUDIES / "table1.yaml")):
        assert find_study(text) == Path(text)
    Path("mine").write_text("config: {}\n")
    Path("quickstart").mkdir()
    assert find_study("mine") == Path("mine")
    assert find_study("quickstart") == STUDIES / "quickstart.yaml"  # the folder is not meant


@pytest.mark.parametrize(("text", "hint"), [("tabel1", "; did you mean table1?"), ("zzz", "")])
def test_an_unknown_name_lists_the_studies_in_one_line(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_study(text)
    listed = ", ".join(study_names())
    assert str(caught.value) == f"{text}: unknown study; name a YAML file, or one of {listed}{hint}"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_line_runs_a_study_by_its_name_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedkace_flwr.experiments", "run"]
    settings = ["--engine=inline", "--set=rounds=1", "--set=clients=2", "--set=epochs=1", "--set=width=4"]
    done = subprocess.run(
        [*command, "quickstart", *settings], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "quickstart" / "fedkace_seed-0" / "summary.json").exists()
    done = subprocess.run([*command, "quikstart"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "did you mean quickstart?" in done.stderr


@pytest.mark.slow
def test_a_wheel_holds_the_studies_and_their_bases(tmp_path: Path) -> None:
    need_tools("git")
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(copy)], check=True)
    build = "import setuptools.build_meta as build, sys; build.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in STUDIES.rglob("*") if path.suffix in (".yaml", ".toml", ".py")]
    assert {path.relative_to(ROOT).as_posix() for path in files} <= held
    assert "fedkace_flwr/experiments/report/paper.yaml" in held and not [
        name for name in held if "experiments/bench" in name
    ]


# YAML


def test_a_file_that_is_missing_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "it is not a regular file")):
        with pytest.raises(ConfigError) as caught:
            load_study(path, {}, tmp_path)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        assert message.startswith(f"{path}: cannot be read ({reason}")


@pytest.mark.parametrize("content", [b"\xff\xfe\xff", b"config: {}\n\x00"])
def test_a_file_that_is_no_text_is_refused_as_no_yaml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trial.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_study(path, {}, tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert str(path) in str(caught.value)
    assert "is not YAML" in str(caught.value)


def test_a_study_cannot_make_objects_of_python(tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text(f"config: !!python/object/apply:os.mkdir ['{tmp_path}/made']")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_study(path, {}, tmp_path)
    assert not (tmp_path / "made").exists()


def test_merging_leaves_both_files_as_they_are() -> None:
    base = {"config": {"rounds": 3, "seed": 1}, "scales": {"smoke": {"config": {"rounds": 2}}, "tiny": {}}}
    mine = {"config": {"seed": 2}, "scales": {"smoke": {"grid": {"seed": [0]}}}, "title": "mine"}
    before = repr((base, mine))
    assert merged(base, mine) == {
        "title": "mine",
        "config": {"rounds": 3, "seed": 2},
        "scales": {"smoke": {"config": {"rounds": 2}, "grid": {"seed": [0]}}, "tiny": {}},
    }
    assert repr((base, mine)) == before


def test_files_that_name_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(ConfigError, match="base: the files name each other without end"):
        load_study(tmp_path / "a.yaml", {}, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]),
        "\n".join(["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]),
        "a: &a {" + ", ".join(f"k{n}: 1" for n in range(5000)) + "}\nb: {<<: [" + "*a, " * 20_000 + "]}\n",
        f"a: &a {'x' * 100_000}\ntitle: [{', '.join(['*a'] * 20_000)}]\n",
    ],
    ids=["lists", "mappings", "merges", "texts"],
)
def test_a_file_that_multiplies_itself_is_refused(text: str, tmp_path: Path) -> None:
    """A few lines could stand for thousands of millions of values."""
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="an alias below an anchor, or more than 100 aliases"):
        read_yaml(path)


def test_keys_can_be_merged(tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text("a: &a {x: p, y: q}\nb: {<<: *a, y: r}\nc: {<<: [*a, {z: s}]}\n")
    content = read_yaml(path)
    assert (content["b"], content["c"]) == ({"x": "p", "y": "r"}, {"x": "p", "y": "q", "z": "s"})


# --set


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("overlap=0", "overlap", 0),
        ("learning-rate=0.5", "learning-rate", 0.5),
        ("learning-rate=1e-3", "learning-rate", 0.001),
        ("lambda-max=1E4", "lambda-max", 10000.0),
        ("normalise=false", "normalise", False),
        ("normalise=true", "normalise", True),
        ("device=cuda:1", "device", "cuda:1"),
        ("data-dir=/a/b=c", "data-dir", "/a/b=c"),
        ("run-name=", "run-name", ""),
        ("seed = 3", "seed", 3),
        ("data-dir='0'", "data-dir", "'0'"),
        ("data-dir=photos #2", "data-dir", "photos #2"),
        ("class-names=010,1:30,off,~", "class-names", "010,1:30,off,~"),
        ("seed=-1", "seed", -1),
        ("lambda-max=5", "lambda-max", 5),  # not 5.0: runs of sweeps are named after it
        ("seed=18446744073709551616", "seed", 2**64),
    ],
)
def test_a_setting_is_read_with_its_type(text: str, key: str, value: Any) -> None:
    got = parse_setting(text)
    assert got == (key, value)
    assert type(got[1]) is type(value)


@pytest.mark.parametrize("text", ["seed=010", "seed=1:30", "seed=0x10", "seed=2.0", "seed=null", "normalise=yes"])
def test_what_is_not_of_its_key_s_type_is_refused_as_it_was_written(text: str) -> None:
    key, value = text.split("=")
    with pytest.raises(ConfigError, match=f"^{key} = '{value}': must be (a whole number|true or false)"):
        check_value(*parse_setting(text))


def test_a_number_of_more_than_64_bits_is_refused_by_its_key() -> None:
    for value in (2**64, 10**5000):
        with pytest.raises(ConfigError, match=r"^seed = .*: must be at least -2\^63 and less than 2\^63"):
            Config.parse({"seed": value})


@pytest.mark.parametrize("text", ["overlap", "=1", ""])
def test_a_setting_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_setting(text)
    assert f"--set {text}: must be key=value" in str(caught.value)
    assert "--set overlap=0" in str(caught.value)


def test_a_key_that_stands_twice_is_refused_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("config:\n  rounds: 2\n  rounds: 3\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml, line 3: .*'rounds' is given twice"):
        load_study(path, {}, tmp_path)


# Hostile files


@pytest.mark.matrix
@pytest.mark.timeout(60)  # in proportion to the file's size it takes less than a second, with its square many minutes
@pytest.mark.parametrize("number", ["1" * 200_000, "!!int '" + "1" * 200_000 + "'", "[" * 100_000])
def test_a_very_long_value_is_refused_at_once_and_in_a_short_line(number: str, tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text(f"config: {{rounds: {number}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_study(path, {}, tmp_path)
    message = str(caught.value)
    assert len(message) < 600 and len(message.splitlines()) == 1 and str(path) in message


@pytest.mark.parametrize("size", [2**18 + 1])
def test_a_study_file_that_is_too_large_is_refused_unread(size: int, tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    with path.open("wb") as file:
        file.write(b"config: {}\n#")
        file.truncate(size)
    with pytest.raises(ConfigError, match=f"it has {size} bytes; at most 262144 are read") as caught:
        load_study(path, {}, tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.timeout(60)
def test_a_study_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trial.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_study(tmp_path / "trial.yaml", {}, tmp_path)


# Names of folders


@pytest.mark.parametrize("scale", ["x/../../../outside", "..", "a\nb"])
def test_a_scale_cannot_name_a_folder_outside_of_the_results(scale: str, tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text(f"config: {{}}\nscales: {{{json.dumps(scale)}: {{config: {{rounds: 2}}}}}}\n")
    with pytest.raises(ConfigError, match=r"scales: .*: must be a plain name") as caught:
        load_study(path, {}, tmp_path / "deep" / "results", scale=scale)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("label", ["a\nb", "n" * 300])
def test_a_label_that_no_folder_can_have_is_refused_by_name(label: str, tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text(f"grid: {{kind: {{{json.dumps(label)}: {{rounds: 2}}, other: {{rounds: 3}}}}}}\n")
    with pytest.raises(ConfigError, match=r"run-name = .*: must be a plain name") as caught:
        load_study(path, {}, tmp_path)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 600
