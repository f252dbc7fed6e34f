"""The command line as somebody meets it: without arguments, with misspelt words, with options in any order."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn
from support.systems.engines import InProcessEngine

from fedkace_flwr import __version__
from fedkace_flwr.config import all_keys
from fedkace_flwr.data.readers.catalogue import DATASETS
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.arguments import commands_of, make_parser, study_first
from fedkace_flwr.experiments.bench.suite import PARTS
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.experiments.running.display import Display
from fedkace_flwr.experiments.studies.names import find_study
from fedkace_flwr.experiments.studies.study import Study, load_study
from fedkace_flwr.experiments.studies.yaml_file import parse_settings

TINY = "config: {rounds: 2, clients: 2}\ngrid: {method: [fedkace, er], seed: [0, 1]}\n"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def study(folder: Path, text: str = TINY, **options: object) -> Study:
    path = folder / "trial.yaml"
    path.write_text(text, encoding="utf-8")
    return load_study(path, {}, folder / "results", **options)  # type: ignore[arg-type]


def names_planned(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split()[0] for line in capsys.readouterr().out.splitlines() if " to do " in line]


# Words


def test_without_arguments_it_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "run quickstart" in out and "--help" in out
    assert [name for name in commands_of(make_parser("fedkace")) if f"\n    {name}" not in out] == []


def test_keys_are_printed_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    every = capsys.readouterr().out
    assert {line.split()[0] for line in every.splitlines() if line[:1].strip()} == {name for _, name, _ in all_keys()}
    for word, name, told in (("OVERLAP", "overlap", ">= 0"), ("derpp-a", "derpp-alpha", "of derpp")):
        assert main(["keys", word]) == 0
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name} = ")]
        assert told in line and 0 < len(out) < len(every) / 2
    assert refused(capsys, "keys", "epocs").endswith("did you mean epochs?")


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and __version__ in capsys.readouterr().out


def test_a_misspelt_word_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, nearest in (
        (["rpeort", "x"], "report"),
        (["run", "quikstart"], "quickstart"),
        (["run", "quickstart.yml", "--dry-run"], "quickstart"),
        (["run", "quickstart", "--set", "method=FedKACE", "--dry-run"], "fedkace"),
        (["run", "quickstart", "--set", "epochs=1,2", "metod=er", "--dry-run"], "method"),
        (["run", "quickstart", "--set", "stream=blured", "--dry-run"], "blurred"),
        (["run", "quickstart", "--scale", "ful", "--dry-run"], "full"),
        (["run", "quickstart", "--only", "fedkace", "fedfram", "--dry-run"], "fedframe"),
        (["run", "quickstart", "--engine", "inlin"], "inline"),
        (["run", "quickstart", "--enigne", "inline"], "--engine"),
        (["stream", "quikstart"], "quickstart"),
        (["table", "x", "--columns", "AA"], "aa"),
        (["bench", "trainin"], "training"),
        (["feed", "x", "--set", "dataset=mnst"], "mnist"),
    ):
        line = refused(capsys, *arguments)
        assert line.endswith(f"did you mean {nearest}?"), line


@pytest.mark.parametrize("command", ["table", "report", "keep", "export", "robustness"])
def test_a_misspelt_folder_is_answered_with_the_nearest(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "results" / "quickstart").mkdir(parents=True)
    target = [str(tmp_path / "target")] if command in ("keep", "export") else []
    line = refused(capsys, command, str(tmp_path / "results" / "quikstart"), *target)
    assert line.endswith(f"did you mean {tmp_path / 'results' / 'quickstart'}?"), line
    line = refused(capsys, command, str(tmp_path / "resluts" / "quikstart"), *target)
    assert "did you mean" not in line  # the folder above does not exist either


def test_a_misspelt_file_of_a_study_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(TINY, encoding="utf-8")
    assert refused(capsys, "run", str(tmp_path / "mien.yaml")).endswith(f"did you mean {own}?")
    (tmp_path / "other.yaml").write_text("base: mime.yaml\n", encoding="utf-8")
    assert refused(capsys, "run", str(tmp_path / "other.yaml")).endswith(f"did you mean {own}?")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("confg: {}\n", "config"),
        ("config: {epoch: 1}\n", "epochs"),
        ("grid: {size: {small: {widht: 2}}}\n", "width"),
        ("scales: {full: {confg: {}}}\n", "config"),
        ("engine: inlin\n", "inline"),
        ("paper: tabel2\n", "table2"),
    ],
)
def test_a_misspelt_word_in_a_study_is_answered_with_the_nearest(
    text: str, nearest: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    line = refused(capsys, "run", str(tmp_path / "own.yaml"), "--dry-run")
    assert line.endswith(f"did you mean {nearest}?"), line


def test_a_mistake_in_a_setting_is_not_blamed_on_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    for setting in ("epoch=3", "epochs=many", "stream=blured", "epochs=1,many"):
        line = refused(capsys, "run", "quickstart", "--dry-run", "--set", setting)
        assert line.startswith(f"error: {'unknown key ' if setting == 'epoch=3' else ''}{setting.partition('=')[0]} = ")


def test_what_the_parser_refuses_is_one_line_that_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["run"], "run: the following arguments are required: study; see "),
        (["run", "quickstart", "--workers", "many"], "invalid int value: 'many'; see "),
        (["run", "quickstart", "--zzz"], "run: unknown option --zzz; see "),
        (["keep", "x"], "keep: the following arguments are required: target; see "),
    ):
        line = refused(capsys, *arguments)
        assert told in line and line.endswith(f"{arguments[0]} --help"), line


def test_a_study_in_place_of_a_command_is_answered_with_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "quickstart").endswith("did you mean run quickstart?")


def test_a_data_set_without_a_name_is_answered_with_the_way_to_use_any_images(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, "run", "quickstart", "--set", "dataset=flowers", "--dry-run")
    assert "dataset = folder" in line and all(name in line for name in DATASETS)


def test_a_configuration_key_at_the_top_of_a_study_is_sent_to_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("dataset: digits\nepochs: 3\n", encoding="utf-8")
    assert "put it under config:" in refused(capsys, "run", str(path))
    path.write_text("confg: {}\n", encoding="utf-8")
    assert refused(capsys, "run", str(path)).endswith("did you mean config?")


def test_help_names_every_part_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = "".join(capsys.readouterr().out.split())  # lines are broken at hyphens too
    assert [part for part in PARTS if part not in out] == []


# Options


def test_options_may_stand_before_the_study_and_take_several_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(find_study("quickstart"))
    asked = ["--engine", "inline", "--results", str(tmp_path), "--dry-run"]
    small = ["--set", "rounds=1", "clients=2", "width=2"]
    for arguments in (
        ["run", *asked, *small, "--seeds", "0,1", "--only", "fedkace", "quickstart"],
        ["run", *asked, *small, "--only", "fedkace", "--seeds", "0", "1", path],
        ["run", "quickstart", *asked, *small, "--seeds", "0", "--seeds", "1", "--only", "fedkace*"],
    ):
        assert main(arguments) == 0
        assert names_planned(capsys) == ["fedkace_seed-0", "fedkace_seed-1"]
    assert "--seeds x: must be whole numbers" in refused(capsys, "run", "quickstart", "--seeds", "x")


def test_the_value_of_an_option_is_not_taken_for_the_study() -> None:
    words = ["run", "--results", "quickstart", "reduced", "--dry-run"]
    assert study_first(words) == ["run", "reduced", "--results", "quickstart", "--dry-run"]
    assert study_first(["run", "quickstart", "--only", "a"]) == ["run", "quickstart", "--only", "a"]
    assert study_first(["report", "--output", "x"]) == ["report", "--output", "x"]


def test_only_takes_parts_of_names(tmp_path: Path) -> None:
    assert list(study(tmp_path, only=["fedkace"]).runs) == ["fedkace_seed-0", "fedkace_seed-1"]
    assert list(study(tmp_path, only=["er", "fedkace_seed-1"]).runs) == ["fedkace_seed-1", "er_seed-0", "er_seed-1"]
    assert list(study(tmp_path, only=["seed-0"]).runs) == ["fedkace_seed-0", "er_seed-0"]
    with pytest.raises(ConfigError, match="no run of"):
        study(tmp_path, only=["fed"])


# What commands say


def test_the_note_of_a_study_is_printed_below_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    path = tmp_path / "trial.yaml"
    path.write_text(
        "note: Too small to tell.\nconfig: {rounds: 1, clients: 2, width: 2, epochs: 1}\n", encoding="utf-8"
    )
    assert main(["run", str(path), "--engine", "inline", "--results", str(tmp_path / "results")]) == 0
    out = capsys.readouterr().out
    assert out.index("chance: accuracy of guessing") < out.index("\nToo small to tell.\n")


def test_feed_says_what_it_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["feed", str(tmp_path), "--set", "clients=2", "rounds=3"]) == 0
    assert f"written: 3 chunks for each of 2 clients, in {tmp_path}" in capsys.readouterr().out
    assert len(list(tmp_path.glob("client-*/new/*.npz"))) == 6


@pytest.mark.parametrize("every", ["-1", "nan"])
def test_feed_refuses_a_pause_that_is_none_before_it_writes(
    every: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "feed", str(tmp_path / "inboxes"), "--every", every)
    assert line == f"error: --every {float(every):g}: must be a number of seconds from 0 to 1000000"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("setting", "named"), [("dataset=mnst", "mnist"), ("samples-per-class=1000", "1000")])
def test_feed_leaves_no_folder_if_there_is_nothing_to_write(
    setting: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refused(capsys, "feed", str(tmp_path / "inboxes"), "--set", setting)
    assert not list(tmp_path.iterdir())


def test_an_app_in_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    line = refused(capsys, "app", str(tmp_path / "file" / "app"))
    assert line == f"error: {tmp_path}/file/app: cannot be written (Not a directory); choose a writable folder"


def test_a_short_study_lists_its_rounds_above_the_live_bars(tmp_path: Path) -> None:
    (name, config), *_ = study(tmp_path).runs.items()
    cell = Cell(name, config)
    cell.folder.mkdir(parents=True)
    records = cell.folder / "rounds.jsonl"
    for rounds, listed in ((200, 2), (201, 0)):
        records.unlink(missing_ok=True)
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=100)
        with Progress(TextColumn("{task.fields[note]}"), console=console) as progress:
            shown = Display(console, 1, rounds, progress)
            shown.begin(cell, 1)
            records.write_text('{"round": 1, "accuracy": 0.5}\n{"round": 2, "accuracy": null}\n')
            shown.follow(cell)
        assert screen.getvalue().count(f"{name}: round ") == listed
        assert "accuracy - %, so far 50.00 %" in screen.getvalue()


def test_where_nothing_can_be_written_is_told_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere, taken = tmp_path / "nodir" / "x", tmp_path / "taken"
    taken.write_text("")
    absent = (
        f"error: --output {nowhere}: cannot be written (there is no folder {nowhere.parent}); must be in an existing"
    )
    (tmp_path / "link").symlink_to(taken)
    for command in (["robustness", "missing"], ["bench", "gpu"], ["stream", "missing"]):
        assert refused(capsys, *command, "--output", str(nowhere)).startswith(absent)
        for there in (str(tmp_path), str(tmp_path / "link"), "/dev/null"):
            line = refused(capsys, *command, "--output", there)
            assert line == f"error: --output {there}: is not a regular file; must be one, or new"
    for command in (["feed", str(taken)], ["feed", str(taken / "x")]):
        line = refused(capsys, *command)
        assert line.startswith(f"error: {command[1]}: cannot be written (") and line.endswith("a writable folder")
    assert not nowhere.parent.exists()


def test_numbers_that_will_not_do_are_told_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--repeats", "--processes"):
        assert refused(capsys, "bench", option, "0") == f"error: {option} 0: must be >= 1"


# Sweeps


def test_several_values_of_a_key_become_runs_with_names_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine", "inline", "--results", str(tmp_path), "--dry-run", "--set", "rounds=1", "clients=2"]
    assert main(["run", "quickstart", *options, "--set", "epochs=1,2", "method=fedkace,er"]) == 0
    assert names_planned(capsys) == [
        "fedkace_epochs-1_seed-0",
        "fedkace_epochs-2_seed-0",
        "er_epochs-1_seed-0",
        "er_epochs-2_seed-0",
    ]


def test_a_sweep_takes_the_place_of_the_files_axis_and_its_values_keep_their_types(tmp_path: Path) -> None:
    swept = study(
        tmp_path, sweeps={"seed": [4, 5], "learning-rate": [0.1, 0.01], "recalibrate-batchnorm": [True, False]}
    )
    assert {config.run.seed for config in swept.runs.values()} == {4, 5}
    assert len(swept.runs) == 16 and "learning-rate" in swept.axes
    settings, sweeps = parse_settings(["epochs=5, 10", "overlap=0", "learning-rate=1e-2,0.1", "augment=none,auto"])
    assert settings == {"overlap": 0}
    assert sweeps == {"epochs": [5, 10], "learning-rate": [0.01, 0.1], "augment": ["none", "auto"]}


def test_free_text_may_hold_commas_and_the_last_setting_of_a_key_counts() -> None:
    assert parse_settings(["class-names=cat,dog", "data-dir=/a,b"]) == (
        {"class-names": "cat,dog", "data-dir": "/a,b"},
        {},
    )
    assert parse_settings(["epochs=1,2", "epochs=3"]) == ({"epochs": 3}, {})
    for text in ("epochs=1,,2", "epochs=1,1", "epochs=1,"):
        with pytest.raises(ConfigError, match="different values between commas"):
            parse_settings([text])
