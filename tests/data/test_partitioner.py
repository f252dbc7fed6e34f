"""The streams as a partitioner of Flower Datasets: the same samples as in a run, sample by sample."""

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.made.datasets import ROOT
from support.tools import need_modules

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, DataError, StreamError
from fedkace_flwr.experiment import Experiment

STREAMS = [
    {},
    {"stream": "blurred:0.3"},
    {"stream": "dirichlet:0.5"},
    {"stream": "quantity-skew"},
    {"shared_samples": False},
]


@pytest.fixture(scope="module")
def hf() -> Any:
    need_modules("datasets", "flwr_datasets")
    import datasets

    datasets.disable_progress_bars()
    return datasets


@pytest.fixture(scope="module")
def splits(hf: Any) -> Any:
    """A training split of 240 pictures, each of a colour of its own, with classes in no order, and a test split."""

    def rows(count: int, seed: int) -> Any:
        labels = np.random.default_rng(seed).permutation(np.arange(count) % 6).tolist()
        pictures = [Image.new("RGB", (4, 4), (row % 256, row // 256, label)) for row, label in enumerate(labels)]
        kinds = hf.Features({"picture": hf.Image(), "kind": hf.ClassLabel(names=list("abcdef"))})
        return hf.Dataset.from_dict({"picture": pictures, "kind": labels}, features=kinds)

    return hf.DatasetDict({"train": rows(240, 0), "test": rows(12, 1)})


def partitioner(clients: int = 3, **keys: Any) -> Any:
    from fedkace_flwr.data.partitioner import StreamPartitioner

    usual: dict[str, Any] = {"rounds": 3, "window": 3, "overlap": 1, "samples_per_class": 4, "seed": 5}
    return StreamPartitioner(clients, "kind", **{**usual, **keys})


@pytest.mark.parametrize("keys", STREAMS, ids=lambda keys: "-".join(map(str, keys.values())) or "windows")
def test_partitions_hold_the_samples_of_a_run(keys: dict[str, Any], splits: Any, tmp_path: Path) -> None:
    splits.save_to_disk(tmp_path / "saved")
    asked = {
        "dataset": "hub",
        "data-dir": str(tmp_path / "saved"),
        "image-size": 4,
        "clients": 3,
        "rounds": 3,
        "window": 3,
        "overlap": 1,
        "samples-per-class": 4,
        "seed": 5,
        **{name.replace("_", "-"): value for name, value in keys.items()},
    }
    experiment, made = Experiment(Config.parse(asked)), partitioner(**keys)
    made.dataset = splits["train"]
    assert made.num_partitions == 3
    for client in (2, 0, 1):
        chunks = [experiment.chunk(client, number) for number in (1, 2, 3)]
        for number, chunk in enumerate(chunks, start=1):
            rows = made.load_chunk(client, number)
            assert rows["kind"][:] == chunk.labels.tolist()
            expected = chunk.images(experiment.dataset.fetch).permute(0, 2, 3, 1).numpy()
            np.testing.assert_array_equal([np.asarray(picture) for picture in rows["picture"]], expected)
        whole = made.load_partition(client)
        assert whole["kind"][:] == [label for chunk in chunks for label in chunk.labels.tolist()]


def test_flowers_federated_data_set_takes_it(
    splits: Any, hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr_datasets import FederatedDataset

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "theirs")
    (tmp_path / "made" / "pictures" / "data").mkdir(parents=True)
    for name, rows in splits.items():
        rows.to_parquet(tmp_path / "made" / "pictures" / "data" / f"{name}-0.parquet")
    theirs, alone = partitioner(), partitioner()
    alone.dataset = splits["train"]
    federated = FederatedDataset(dataset="made/pictures", partitioners={"train": theirs}, shuffle=False)
    assert federated.load_partition(1)["kind"][:] == alone.load_partition(1)["kind"][:]
    colours = [
        [picture.getpixel((0, 0)) for picture in each.load_chunk(1, 2)["picture"]]
        for each in (federated.partitioners["train"], alone)
    ]
    assert colours[0] == colours[1]


def test_values_of_a_plain_column_are_classes_in_ascending_order(hf: Any, splits: Any) -> None:
    plain, declared = partitioner(), partitioner()
    declared.dataset = splits["train"]
    words = [f"class {label}" for label in splits["train"]["kind"]]
    plain.dataset = hf.Dataset.from_dict({"kind": words})
    expected = [f"class {label}" for label in declared.load_partition(0)["kind"]]
    assert plain.load_partition(0)["kind"][:] == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window": 0}, "^window = 0: must be >= 1"),
        ({"clients": 2.5}, "^clients = 2.5: must be a whole number"),
        ({"stream": "waves"}, "^stream = 'waves': must be one of windows, blurred"),
        ({"streams": 1}, "^unknown key streams = 1; .*did you mean stream?"),
        ({"stream": "windoes"}, "^stream = 'windoes': .*did you mean windows?"),
    ],
)
def test_keys_are_checked_at_once(hf: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partitioner(**keys)


def test_what_does_not_fit_is_refused_before_the_first_row(splits: Any) -> None:
    def loaded(client: int = 0, number: int = 1, **keys: Any) -> Any:
        made = partitioner(**keys)
        made.dataset = splits["train"]
        return made.load_chunk(client, number)

    with pytest.raises(ConfigError, match=r"^partition_id = 3: must be between 0 and 2$"):
        loaded(client=3)
    with pytest.raises(ConfigError, match=r"^partition_id = -1: must be between 0 and 2$"):
        loaded(client=-1)
    for number in (0, 4):
        with pytest.raises(ConfigError, match=rf"^round_number = {number}: must be between 1 and rounds = 3$"):
            loaded(number=number)
    with pytest.raises(ConfigError, match=r"^window = 7: must be between 1 and the number of classes, 6$"):
        loaded(window=7)
    with pytest.raises(StreamError, match="client 0 would need 60 training samples"):
        loaded(samples_per_class=20, window=6, overlap=6)
    with pytest.raises(StreamError, match="clients up to 2 together"):  # client 0 alone would have enough
        loaded(samples_per_class=5, window=6, overlap=6, shared_samples=False)
    other = partitioner()
    other.dataset = splits["train"].rename_column("kind", "label")
    with pytest.raises(DataError, match=r"^partition_by = 'kind': the data set has the columns picture, label$"):
        other.load_partition(0)


def test_a_missing_package_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fedkace_flwr.data.partitioner", raising=False)
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("fedkace_flwr.data.partitioner")
    assert str(caught.value) == "StreamPartitioner needs the extra `hub`: pip install 'fedkace-flwr[hub]'"


def test_the_pages_example_prints_what_the_page_says(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8").split("## In other Flower apps")[1]
    example, printed = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)[:2]
    monkeypatch.setattr(sys, "argv", ["example.py"])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "example.py", "exec"), {"__name__": "__main__"})
    assert out.getvalue() == printed
