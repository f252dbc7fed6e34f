"""A data set that has no test split gets one from the seed, by ``test-share``."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.common import rounds_of
from support.made.datasets import assert_consistent, cache_folder
from support.systems.cut_off import cut_after_round
from support.tools import need_modules

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import CACHE, Dataset, load_dataset
from fedkace_flwr.data.readers import Content, Origin, Source
from fedkace_flwr.data.readers.catalogue import DATASETS
from fedkace_flwr.errors import ConfigError, DataError
from fedkace_flwr.experiment import Experiment, shared_experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.sections import DataConfig

COUNTS = [20, 10, 3, 2]
LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(4), COUNTS))
IMAGES = np.random.default_rng(0).integers(0, 256, (35, 3, 8, 8), np.uint8)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """A data set of another package without a test split."""
    return unsplit(monkeypatch, LABELS)


def unsplit(monkeypatch: pytest.MonkeyPatch, labels: np.ndarray) -> DataConfig:
    names = tuple("abcdefg"[: labels.max() + 1])
    read = lambda: Content(names, labels, len(labels), iter([IMAGES[: len(labels)]]))  # noqa: E731
    monkeypatch.setitem(DATASETS, "theirs", Source(None, 8, lambda config, size: Origin("1", read)))
    return DataConfig("theirs")


def sizes(dataset: Dataset) -> list[int]:
    return [len(dataset.test_ids(label)) for label in range(dataset.num_classes)]


def held_out(dataset: Dataset) -> list[int]:
    return np.flatnonzero(dataset.held_out).tolist()


def test_the_split_is_by_class_from_the_seed_alone(
    whole: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = load_dataset(whole, 3)
    assert_consistent(dataset)
    assert sizes(dataset) == [4, 2, 1, 1] and dataset.train_size == 27
    assert held_out(dataset) == [1, 13, 18, 22, 23, 27, 28, 29]  # on every machine
    few = load_dataset(replace(whole, num_classes=2), 3)
    np.testing.assert_array_equal(few.test_ids(1), dataset.test_ids(1))
    monkeypatch.setenv(CACHE, str(tmp_path / "another machine"))
    assert held_out(load_dataset(whole, 3)) == held_out(dataset)


@given(st.floats(0.001, 0.99), st.integers(0, 2**63 - 1))
def test_every_class_is_in_both_splits(share: float, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        config = replace(unsplit(patch, LABELS), test_share=share)
        dataset = load_dataset(config, seed)
    assert_consistent(dataset)
    assert sizes(dataset) == [min(max(round(share * count), 1), count - 1) for count in COUNTS]


def test_a_class_of_one_sample_is_for_training_and_refused_by_runs(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit(monkeypatch, np.repeat([0, 1, 2], [20, 14, 1]))
    config = small(dataset="theirs", clients=1, rounds=1, window=2, overlap=0, capacity=3)
    experiment = Experiment(config)
    assert sizes(experiment.dataset) == [4, 3, 0]
    with pytest.raises(DataError, match=r"class c of theirs has no test samples; .* needs two or more"):
        experiment.test_set(0, experiment.labels_of(np.arange(3)) >= 0)


def test_one_prepared_copy_serves_all_seeds_and_shares(whole: DataConfig, cache: Path) -> None:
    """And the files that hold the statistics of each split may be damaged or missing."""
    asked = [(0.2, 3), (0.2, 4), (0.5, 3)]
    first = [load_dataset(replace(whole, test_share=share), seed) for share, seed in asked]
    assert len({each.split_digest for each in first}) == 3 and len({each.digest for each in first}) == 1
    assert len({each.mean for each in first}) == 3
    kept = sorted(cache_folder(cache).glob("split-*.json"))
    assert len(kept) == 3
    kept[0].unlink()
    kept[1].write_text('{"mean": [1, 2')
    for (share, seed), before in zip(asked, first, strict=True):
        again = load_dataset(replace(whole, test_share=share), seed)
        assert held_out(again) == held_out(before) and again.split_digest == before.split_digest
        assert (again.mean, again.std) == (before.mean, before.std)


def test_a_data_set_with_a_test_split_keeps_it(digits: DataConfig) -> None:
    usual, other = load_dataset(digits), load_dataset(replace(digits, test_share=0.5), 9)
    assert usual.split_digest == other.split_digest == ""
    assert held_out(usual) == held_out(other) == list(range(usual.train_size, 1797))


def test_a_share_that_has_no_effect_is_named(small: Callable[..., Config], caplog: pytest.LogCaptureFixture) -> None:
    run_inline(small(rounds=1, test_share=0.3))
    assert "test-share = 0.3 has no effect: data set digits has a test split" in caplog.text
    assert Config.parse({"dataset": "inbox", "class-names": "a, b", "image-size": 8, "test-share": 0.3}).unread == {
        "test-share": 0.3
    }


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_of_nothing_or_of_all_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=rf"^test-share = {share}: must be > 0 and <= 0.99"):
        Config.parse({"test-share": share})


# Runs on scanned digits in a single Hugging Face Dataset


@pytest.fixture
def scans(tmp_path: Path) -> dict[str, Any]:
    need_modules("datasets")
    import datasets as hf
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = [Image.fromarray(np.rint(scan * (255 / 16)).astype(np.uint8)) for scan in digits.images]
    kinds = hf.Features({"scan": hf.Image(), "digit": hf.ClassLabel(10)})
    hf.disable_progress_bars()
    rows = hf.Dataset.from_dict({"scan": pictures, "digit": digits.target}, features=kinds)
    rows.save_to_disk(tmp_path / "scans")
    return {"dataset": "hub", "data_dir": str(tmp_path / "scans"), "image_size": 8}


def test_a_resumed_run_has_the_split_of_an_uninterrupted_one(
    small: Callable[..., Config],
    scans: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {**scans, "method": "er", "learning_rate": 0.01, "epochs": 3, "width": 8}
    with caplog.at_level(logging.INFO):
        run_inline(small(**given, run_name="whole"))
    assert "has no test split; test-share = 0.2 of each class is one" in caplog.text
    whole = rounds_of(tmp_path / "whole")
    assert [each["round"] for each in whole] == [1, 2, 3]
    cut_after_round(small(**given), 2, monkeypatch)
    shared_experiment.cache_clear()  # as in another process
    with pytest.raises(ConfigError, match=r"test-share = 0.3: the run in .* was begun with 0.2;"):
        run_inline(small(**given, resume=True, test_share=0.3))
    run_inline(small(**given, resume=True))
    assert rounds_of(tmp_path / "run") == whole
    shared_experiment.cache_clear()
    run_inline(small(**given, run_name="other", test_share=0.4))
    assert rounds_of(tmp_path / "other") != whole


def test_no_client_trains_on_a_test_sample(small: Callable[..., Config], scans: dict[str, Any]) -> None:
    experiment = Experiment(small(**scans))
    test, drawn = set(held_out(experiment.dataset)), set[int]()
    assert len(test) == sum(round(0.2 * int(count)) for count in np.bincount(experiment.dataset.labels))
    for client in range(3):
        for number in range(1, 4):
            drawn |= set(experiment.chunk(client, number).content.tolist())
        met = experiment.labels_of(np.arange(10)) >= 0
        assert set(experiment.test_set(client, met).content.tolist()) == test
    assert drawn and not drawn & test


def test_what_a_client_stored_under_another_split_is_not_taken_over(
    small: Callable[..., Config], scans: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Among its samples are some that this split holds out."""

    def run(name: str, **changes: Any) -> None:
        config = small(**scans, method="er", memory="keep", rounds=1, clients=1, run_name=name, **changes)
        run_inline(config, node_config=lambda partition: {"state-dir": str(tmp_path / "device")})

    with caplog.at_level(logging.INFO):
        run("first")
        run("same")
        assert "begins with the memory" in caplog.text
        caplog.clear()
        run("other", seed=8)
    assert "starts without the memory" in caplog.text and "begins with the memory" not in caplog.text
