"""Studies: from a YAML file to the runs it asks for, and the words in which a file is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.studies.study import load_study


def study_file(folder: Path, text: str, name: str = "trial.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, overrides: dict[str, Any] | None = None, **options: Any):  # type: ignore[no-untyped-def]
    return load_study(study_file(folder, text), overrides or {}, folder / "results", **options)


def refusal(folder: Path, text: str, overrides: dict[str, Any] | None = None, **options: Any) -> str:
    """The message with which a study is refused: one line that names the file."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, overrides, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(folder / "trial.yaml"))
    return message


# What a study asks for


def test_a_study_without_a_grid_is_one_run_of_its_config(tmp_path: Path) -> None:
    study = load(tmp_path, "config: {overlap: 0, seed: 4, learning-rate: 1}")
    assert study.name == "trial"
    assert list(study.runs) == ["fedkace_seed-4"]
    config = study.runs["fedkace_seed-4"]
    own = {"results-dir": str(tmp_path / "results" / "trial"), "run-name": "fedkace_seed-4"}
    asked = {"overlap": 0, "seed": 4, "learning-rate": 1.0, "data-dir": str(Path("data").resolve())}
    assert config == Config.parse(asked | own)


def test_an_empty_config_is_the_defaults(tmp_path: Path) -> None:
    for text in ("config:\n", "config: {}\n", "engine: inline\n", "config: {}\ngrid:\n"):
        assert list(load(tmp_path, text).runs) == ["fedkace_seed-0"]


def test_a_grid_is_the_product_of_its_lists_with_telling_names(tmp_path: Path) -> None:
    study = load(tmp_path, "config: {rounds: 3, seed: 9}\ngrid: {overlap: [0, 1], seed: [0, 1, 2]}")
    assert list(study.runs) == [
        "fedkace_overlap-0_seed-0",
        "fedkace_overlap-0_seed-1",
        "fedkace_overlap-0_seed-2",
        "fedkace_overlap-1_seed-0",
        "fedkace_overlap-1_seed-1",
        "fedkace_overlap-1_seed-2",
    ]
    for name, config in study.runs.items():
        assert config.run.run_name == name
        assert name == f"fedkace_overlap-{config.stream.overlap}_seed-{config.run.seed}"
        assert config.stream.rounds == 3
    assert len(set(study.runs.values())) == 6


def test_a_grid_over_methods_names_each_run_by_its_method(tmp_path: Path) -> None:
    assert list(load(tmp_path, "grid: {method: [er, fedavg]}").runs) == ["er_seed-0", "fedavg_seed-0"]


def test_the_grid_goes_before_the_config_and_overrides_before_both(tmp_path: Path) -> None:
    text = "config: {overlap: 2, epochs: 3, batch-size: 8}\ngrid: {overlap: [0, 1], epochs: [4, 5]}"
    study = load(tmp_path, text, {"overlap": 2, "batch-size": 16})
    assert list(study.runs) == ["fedkace_epochs-4_seed-0", "fedkace_epochs-5_seed-0"]
    for config in study.runs.values():
        assert (config.stream.overlap, config.training.batch_size) == (2, 16)
    seeds = load(tmp_path, "grid: {seed: [0, 1]}", {"seed": 7}).runs
    assert list(seeds) == ["fedkace_seed-7"]


def test_names_of_runs_are_names_of_single_folders(tmp_path: Path) -> None:
    study = load(tmp_path, "grid: {data-dir: [/a/b, c]}")
    assert list(study.runs) == ["fedkace_data-dir--a-b_seed-0", "fedkace_data-dir-c_seed-0"]
    assert [config.data.data_dir for config in study.runs.values()] == ["/a/b", str(Path("c").resolve())]


def test_runs_whose_names_would_fall_together_are_refused_and_none_is_lost(tmp_path: Path) -> None:
    message = refusal(tmp_path, "grid: {data-dir: [a/b, a-b]}")
    assert "fedkace_data-dir-a-b_seed-0" in message


def test_paths_are_the_users_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may run in another working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    text = "config: {data-dir: here, state-dir: ~/state}"
    (config,) = load_study(study_file(tmp_path, text), {}, Path("out")).runs.values()
    assert config.run.results_dir == str(tmp_path / "out" / "trial")
    assert config.data.data_dir == str(tmp_path / "here")
    assert config.run.state_dir == "/home/someone/state/trial/fedkace_seed-0"
    (config,) = load_study(study_file(tmp_path, "config: {}"), {}, Path("out")).runs.values()
    assert config.data.data_dir == str(tmp_path / "data")
    assert config.run.state_dir == ""  # empty still means what it means


def test_a_value_is_read_by_the_type_of_its_key(tmp_path: Path) -> None:
    """As on the command line; YAML by itself takes 1e-3 for a text and off for a truth value."""
    text = (
        "config: {weight-decay: 1e-3, defence: off, secagg: true, class-names: '010'}\ngrid: {learning-rate: [1e-2, 1]}"
    )
    study = load(tmp_path, text)
    assert [config.training.learning_rate for config in study.runs.values()] == [0.01, 1.0]
    assert list(study.runs) == ["fedkace_learning-rate-0.01_seed-0", "fedkace_learning-rate-1_seed-0"]
    values = next(iter(study.runs.values())).flat()
    assert [values[key] for key in ("weight-decay", "defence", "secagg", "class-names")] == [0.001, "off", True, "010"]
    for written in ("010", "1:30", "yes", "0x10"):
        assert f"seed = '{written}': must be a whole number" in refusal(tmp_path, f"config: {{seed: {written}}}")


def test_engine_workers_and_gpu_come_from_options_before_the_file_before_defaults(tmp_path: Path) -> None:
    plain = load(tmp_path, "config: {}")
    assert (plain.engine, plain.workers, plain.gpu_fraction) == ("flower", None, None)
    text = "engine: inline\nworkers: 3\ngpu-fraction: 0.25"
    stated = load(tmp_path, text)
    assert (stated.engine, stated.workers, stated.gpu_fraction) == ("inline", 3, 0.25)
    assert type(stated.workers) is int
    asked = load(tmp_path, text, engine="flower", workers=1, gpu_fraction=0.0)
    assert (asked.engine, asked.workers, asked.gpu_fraction) == ("flower", 1, 0.0)
    empty = load(tmp_path, text, engine=None, workers=None, gpu_fraction=None)
    assert (empty.engine, empty.workers, empty.gpu_fraction) == ("inline", 3, 0.25)
    assert load(tmp_path, "gpu-fraction: 1").gpu_fraction == 1.0


# What is refused


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["must hold keys", "config"]),
        ("- a\n- b\n", ["must hold keys"]),
        ("config: {a: 1\ngrid: ]", ["line 2", "is not YAML"]),
        ("config:\n\toverlap: 1", ["line 2", "is not YAML"]),
        ("config: {}\nconfg: {}", ["unknown key 'confg'", "title, note, config, grid, scales", "did you mean config?"]),
        ("overlap: 1", ["unknown key 'overlap'"]),
        ("config: {overlp: 1}", ["unknown key overlp = 1", "did you mean overlap?"]),
        ("config: {overlap: 3}", ["overlap = 3", "window = 2"]),
        ("grid: {method: [fedkace, fedkase]}", ["method = 'fedkase'", "did you mean fedkace?"]),
        ("config: {overlap: two}", ["overlap = 'two'", "a whole number"]),
        ("config: {learning-rate: nan}", ["learning-rate = nan", "finite"]),
        ("config: {overlap: }", ["overlap = ''", "a whole number"]),
        ("config: [overlap]", ["config", "must hold configuration keys"]),
        ("grid: overlap", ["grid", "must hold configuration keys"]),
        ("grid: {overlap: 1}", ["grid: overlap = '1'", "a list of different values"]),
        ("grid: {overlap: []}", ["grid: overlap = []", "a list of different values"]),
        ("grid: {seed: [0, 1, 0]}", ["grid: seed = ['0', '1', '0']", "a list of different values"]),
        ("grid: {overlap: [0, 3]}", ["overlap = 3", "window = 2"]),
        ("grid: {overlp: [0]}", ["overlp", "did you mean overlap?"]),
        ("grid: {seed: [[0], 1]}", ["seed = ['0']", "a whole number"]),
        ("config: {method: latest, latest-share: 0.8}", ["method = 'latest'", "must be one of"]),
        ("engine: ray", ["engine = 'ray'", "flower or inline"]),
        ("engine: [inline]", ["engine = ['inline']", "flower or inline"]),
        ("workers: 0", ["workers = 0", ">= 1"]),
        ("workers: two", ["workers = 'two'", ">= 1"]),
        ("workers: 1.5", ["workers = '1.5'", "whole number >= 1"]),
        ("gpu-fraction: -0.5", ["gpu-fraction = -0.5", ">= 0"]),
        ("gpu-fraction: inf", ["gpu-fraction = inf", ">= 0"]),
        ("config: {results-dir: x}", ["results-dir", "--results"]),
        ("grid: {run-name: [x, y]}", ["run-name", "--results"]),
    ],
)
def test_a_study_that_will_not_do_is_refused_with_file_key_and_value(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    message = refusal(tmp_path, text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"results-dir": "x"}, ["results-dir", "--results"]),
        ({"run-name": "x"}, ["run-name", "--results"]),
        ({"overlap": 9}, ["overlap = 9"]),
    ],
)
def test_overrides_that_do_not_fit_the_study_are_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(tmp_path, "config: {}", overrides)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"overlp": 1}, "unknown key overlp = 1; did you mean overlap?"),
        ({"overlap": "0"}, "overlap = '0': must be a whole number"),
    ],
)
def test_overrides_that_no_study_takes_are_refused_without_its_name(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "config: {}", overrides)
    assert str(caught.value) == message


@pytest.mark.parametrize(("options", "part"), [({"workers": 0}, "workers = 0"), ({"gpu_fraction": -1.0}, "-1.0")])
def test_options_that_will_not_do_are_refused(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    assert part in refusal(tmp_path, "config: {}", **options)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


GROUPS = """
config: {dataset: digits, rounds: 3}
grid:
  size:
    small: {capacity: 20, epochs: 1}
    large: {capacity: 40, epochs: 2}
    as-it-is:
  seed: [0, 1]
scales:
  smoke: {config: {rounds: 2}, grid: {seed: [5], size: {tiny: {capacity: 10}}}}
  plain: {grid: {size: }}
"""


def test_named_groups_of_keys_are_an_axis(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, "groups.yaml", GROUPS), {}, tmp_path)
    assert [(c.buffer.capacity, c.training.epochs, c.run.seed) for c in study.runs.values()] == [
        *((20, 1, 0), (20, 1, 1), (40, 2, 0), (40, 2, 1)),
        *((Config().buffer.capacity, Config().training.epochs, seed) for seed in (0, 1)),
    ]
    assert list(study.runs)[:3] == ["fedkace_small_seed-0", "fedkace_small_seed-1", "fedkace_large_seed-0"]
    assert study.cells["fedkace_large_seed-0"] == {"size": "large", "seed": 0, "method": "fedkace"}
    assert study.axes == ["size", "seed", "method"]


def test_a_scale_changes_config_and_grid_and_has_a_folder_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "groups.yaml", GROUPS)
    smoke = load_study(path, {}, tmp_path, scale="smoke")
    (name,) = smoke.runs
    assert name == "fedkace_tiny_seed-5"
    config = smoke.runs[name]
    assert (config.stream.rounds, config.buffer.capacity, config.data.dataset) == (2, 10, "digits")
    assert (smoke.folder, load_study(path, {}, tmp_path).folder) == (tmp_path / "groups-smoke", tmp_path / "groups")
    assert list(load_study(path, {}, tmp_path, scale="plain").runs) == ["fedkace_seed-0", "fedkace_seed-1"]


def test_only_and_seeds_choose_among_the_runs(tmp_path: Path) -> None:
    path = write(tmp_path, "groups.yaml", GROUPS)
    chosen = load_study(path, {}, tmp_path, only=["*small*", "*seed-1"], seeds=[1, 2])
    assert list(chosen.runs) == list(chosen.cells)
    assert sorted(chosen.runs) == [
        *("fedkace_as-it-is_seed-1", "fedkace_large_seed-1", "fedkace_small_seed-1", "fedkace_small_seed-2"),
    ]
    with pytest.raises(ConfigError, match=r"--only er_\*: no run of .*; the first is fedkace_small_seed-0"):
        load_study(path, {}, tmp_path, only=["er_*"])


def test_a_base_fills_in_key_by_key_and_axis_by_axis(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", GROUPS)
    text = "base: base.yaml\nconfig: {epochs: 7}\ngrid: {seed: [3]}\nscales: {smoke: {config: {epochs: 1}}}\n"
    path = write(tmp_path, "mine.yaml", text)
    study = load_study(path, {}, tmp_path)
    assert list(study.runs) == ["fedkace_small_seed-3", "fedkace_large_seed-3", "fedkace_as-it-is_seed-3"]
    assert study.runs["fedkace_as-it-is_seed-3"].training.epochs == 7
    assert study.runs["fedkace_as-it-is_seed-3"].stream.rounds == 3
    (smoke,) = load_study(path, {}, tmp_path, scale="smoke").runs.values()
    assert (smoke.run.seed, smoke.stream.rounds, smoke.training.epochs) == (5, 2, 1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("scales: {smoke: {rounds: 2}}", "scales: smoke: unknown key 'rounds'; the keys are config, grid"),
        ("grid: {size: {a: {capacity: 20}}, capacity: [30]}", "capacity is on two axes"),
        ("grid: {size: {a: 3}}", "must be a list of different values, or named groups of keys"),
        ("grid: {size: {a: {capactiy: 3}}}", "capactiy"),
        ("base: nowhere.yaml", "nowhere.yaml: cannot be read"),
    ],
)
def test_what_a_study_says_of_scales_groups_and_others_is_checked(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_study(write(tmp_path, "study.yaml", text), {}, tmp_path, scale="smoke" if "scales" in text else "full")
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_scale_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--scale tiny: the file has full, smoke, plain"):
        load_study(write(tmp_path, "groups.yaml", GROUPS), {}, tmp_path, scale="tiny")


STUDIES = sorted((Path(__file__).parents[3] / "experiments" / "studies").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_of_the_repository_reads_at_each_of_its_scales(path: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    scales = ["reduced", "smoke"] if "base" in content else list(content.get("scales", {}))
    for scale in ("full", *scales):
        study = load_study(path, {}, tmp_path, scale=scale)
        assert study.runs and set(study.runs) == set(study.cells)


def test_seeds_that_are_named_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seed is set beside --seeds 3 4; must be set by one of them$"):
        load(tmp_path, "grid: {seed: [0, 1]}", {"seed": 5}, seeds=[3, 4])
