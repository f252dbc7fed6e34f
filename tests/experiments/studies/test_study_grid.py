"""A study's grid by itself: axes, their product, and the names of runs."""

from pathlib import Path
from typing import Any

import pytest

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.studies.grid import Axis, combinations, parse_grid, run_name
from fedkace_flwr.experiments.studies.study import load_study


def test_combinations_are_in_order_and_the_last_axis_varies_fastest() -> None:
    axes = parse_grid({"size": {"small": {"capacity": 20, "epochs": 1}, "plain": None}, "seed": [0, 1]}, [])
    points = list(combinations(axes))
    assert [labels for labels, _ in points] == [
        {"size": size, "seed": seed} for size in ("small", "plain") for seed in (0, 1)
    ]
    assert [values for _, values in points] == [
        {"capacity": 20, "epochs": 1, "seed": 0},
        {"capacity": 20, "epochs": 1, "seed": 1},
        {"seed": 0},
        {"seed": 1},
    ]


def test_no_axis_makes_one_empty_combination() -> None:
    assert list(combinations([])) == [({}, {})]


def test_axes_without_values_and_overridden_axes_are_dropped() -> None:
    axes = parse_grid({"overlap": "", "seed": [0], "window": [2, 3]}, ["seed"])
    assert [axis.name for axis in axes] == ["window"]


def test_a_value_that_cannot_be_a_label_is_labelled_by_its_text() -> None:
    axis = Axis.parse("seed", [[0], 1])
    assert list(axis.points) == ["[0]", 1]
    assert axis.points["[0]"] == {"seed": [0]}


@pytest.mark.parametrize("values", [[], {}, "two", 3, [0, 0], [1, True], {"a": 3}], ids=repr)
def test_an_axis_is_a_list_of_different_values_or_groups(values: object) -> None:
    with pytest.raises(ConfigError, match=r"grid: overlap = .*: must be a list of different values, or named groups"):
        Axis.parse("overlap", values)


def test_a_grid_of_too_many_runs_is_refused_before_any_is_made() -> None:
    wide = {key: list(range(400)) for key in ("seed", "overlap")}
    with pytest.raises(ConfigError, match="grid: makes 160000 runs, more than 100000"):
        parse_grid(wide, [])


def test_a_run_is_named_by_method_labels_and_seed() -> None:
    axes = parse_grid({"method": ["er"], "data": {"a/b": {}}, "overlap": [1], "seed": [4]}, [])
    ((labels, values),) = combinations(axes)
    assert run_name(Config.parse(values), axes, labels) == "er_a-b_overlap-1_seed-4"


@pytest.mark.parametrize(
    ("grid", "overrides"),
    [
        ("{method: [er-balanced, fedframe], recalibrate-batchnorm: [false, true]}", {}),
        ("{method: [er-balanced, fedframe]}", {"recalibrate-batchnorm": False}),
        ("{variant: {plain: {method: fedframe, recalibrate-batchnorm: false}}}", {}),
    ],
)
def test_a_choice_that_a_method_would_replace_is_refused(tmp_path: Path, grid: str, overrides: dict[str, Any]) -> None:
    """Even that of a default: its runs would be shown under a value that they do not have."""
    path = tmp_path / "trial.yaml"
    path.write_text(f"grid: {grid}\n")
    message = "recalibrate-batchnorm = False: method = 'fedframe' sets it to True, so it would have no effect"
    with pytest.raises(ConfigError, match=message):
        load_study(path, overrides, tmp_path / "results")


def test_a_key_that_no_method_of_the_study_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text("config: {lambda-max: 7.0}\ngrid: {method: [er, derpp]}\n")  # what the file says is left alone
    for options in ({"overrides": {"fedprox-mu": 0.1}}, {"overrides": {}, "sweeps": {"fedprox-mu": [0.1, 0.2]}}):
        message = "fedprox-mu = 0.1: no method of this study reads it; it is a key of fedprox$"
        with pytest.raises(ConfigError, match=message):
            load_study(path, results=tmp_path / "results", **options)
    study = load_study(path, {"derpp-alpha": 0.3}, tmp_path / "results", only=["er"])
    assert list(study.runs) == ["er_seed-0"], "a study may be run in parts with the same options"
