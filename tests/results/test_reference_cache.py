"""The Centralized reference: its cache, its interpolation, and that each round stands for itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of

from fedkace_flwr.clients.centralized import CentralizedKeys
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.data import pixels
from fedkace_flwr.data.datasets import CACHE
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.results.reference_cache import cached_accuracy, fingerprint, reference_keys

Make = Callable[..., Config]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 70), st.data())
def test_anchors_enclose_the_round_and_are_trained_rounds(
    rounds: int, every: int, first: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, rounds))
    trained = {*range(1, rounds + 1, every), *range(1, min(first, rounds) + 1), rounds}
    below, above = CentralizedKeys(f"every:{every}:{first}").anchors(number, rounds)
    assert {below, above} <= trained and below <= number <= above
    assert (below == above) == (number in trained)
    assert not [other for other in trained if below < other < above]


def test_the_fingerprint_holds_what_the_reference_depends_on_and_nothing_else() -> None:
    usual = Config()
    assert fingerprint(usual) == fingerprint(replace(usual, stream=replace(usual.stream, clients=3, rounds=99)))
    assert fingerprint(usual) == fingerprint(replace(usual, buffer=replace(usual.buffer, capacity=77)))
    others = [
        replace(usual, stream=replace(usual.stream, overlap=0)),
        replace(usual, training=replace(usual.training, epochs=6)),
        replace(usual, run=replace(usual.run, seed=1)),
        replace(usual, data=replace(usual.data, num_classes=9)),
        replace(usual, model=replace(usual.model, width=9)),
    ]
    assert len({fingerprint(config) for config in [usual, *others]}) == 6


@pytest.mark.parametrize(
    ("change", "leaves_out"),
    [
        ({"stream": "dirichlet"}, {"clients", "rounds"}),
        ({"stream": "blurred"}, {"clients"}),
        ({"stream": "quantity-skew"}, {"rounds"}),
        ({"shared-samples": False}, set()),
    ],
)
def test_the_fingerprint_holds_clients_and_rounds_if_samples_depend_on_them(
    change: dict[str, Any], leaves_out: set[str]
) -> None:
    asked = fingerprint(Config.parse(change))
    assert asked != fingerprint(Config())
    for name, value in (("clients", 3), ("rounds", 99)):
        assert (fingerprint(Config.parse({**change, name: value})) == asked) == (name in leaves_out)


def test_mirroring_counts_where_it_changes_the_training() -> None:
    def of(**keys: object) -> str:
        method = {"method": "centralized", "dataset": "folder", "data-dir": "anywhere"}
        return fingerprint(configured(Config.parse({**method, **keys}))[1])

    assert of(mirroring="allowed") == of()
    assert of(mirroring="allowed", augment="auto") == of(augment="flip-shift") != of(augment="auto") == of()


def test_the_fingerprint_changes_with_the_file_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    config = Config.parse({"weights-file": str(path)})
    found = {fingerprint(Config()), fingerprint(config)}
    for size in (1, 2):
        path.write_bytes(b"x" * size)
        found.add(fingerprint(config))
    assert len(found) == 4


def test_a_reference_to_image_files_that_were_read_otherwise_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("digits", "cifar100", "folder", "hub", "imagenet100")

    def found() -> list[str]:
        return [fingerprint(Config.parse({"dataset": name})) for name in names]

    before = found()
    monkeypatch.setattr(pixels, "READING", pixels.READING + 1)
    assert [one == other for one, other in zip(before, found(), strict=True)] == [True, True, False, False, False]


def test_the_fingerprint_covers_every_key_that_the_reference_depends_on() -> None:
    usual, defaults = Config(), Config().flat()
    covered = set()
    for name in reference_keys():
        value = defaults[name]
        changed = not value if isinstance(value, bool) else "other" if isinstance(value, str) else value * 2 + 1
        for part in ("data", "stream", "model", "training", "run"):
            section, field = getattr(usual, part), name.replace("-", "_")
            if hasattr(section, field):
                other = replace(usual, **{part: replace(section, **{field: changed})})
                covered |= {name} if fingerprint(other) != fingerprint(usual) else set()
    assert covered == set(reference_keys()) - {"clients", "rounds"}
    assert {"dataset", "overlap", "epochs", "seed"} <= covered
    assert not {"batching", "capacity", "method", "data-dir", "threads"} & set(reference_keys())


def test_an_accuracy_is_computed_once_and_again_if_its_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    config = Config()
    computed: list[int] = []

    def compute() -> float:
        computed.append(1)
        return 0.625

    assert [cached_accuracy(config, 2, 5, compute) for _ in range(3)] == [0.625] * 3 and len(computed) == 1
    (path,) = tmp_path.rglob("*.json")
    path.write_text("{")
    assert cached_accuracy(config, 2, 5, compute) == 0.625 and len(computed) == 2


def test_an_accuracy_on_other_data_in_the_same_place_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    config = Config()
    assert [cached_accuracy(config, 0, 1, lambda: 0.5, data) for data in ("one", "one")] == [0.5, 0.5]
    assert [cached_accuracy(config, 0, 1, lambda: 0.25, data) for data in ("one", "two", "two")] == [0.5, 0.25, 0.25]
    (path,) = tmp_path.rglob("*.json")
    path.write_text('{"accuracy": 0.75}')  # as earlier versions stored it
    assert cached_accuracy(config, 0, 1, lambda: 0.25, "one") == 0.75


def test_a_round_does_not_depend_on_the_rounds_before_it(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rounds in (("each", "all"), ("third", "every:3")):
        monkeypatch.setenv(CACHE, str(tmp_path / "caches" / name))
        run_inline(small(method="centralized", run_name=name, centralized_rounds=rounds, clients=2, rounds=4))
    each, third = rounds_of(tmp_path / "each"), rounds_of(tmp_path / "third")
    assert [record["interpolated"] for record in each] == [False] * 4
    assert [record["interpolated"] for record in third] == [False, True, True, False]
    for index in (0, 3):
        assert each[index]["client_accuracy"] == third[index]["client_accuracy"]
    for client in range(2):
        first, second, _, last = (record["client_accuracy"][client] for record in third)
        assert second == pytest.approx(first + (last - first) / 3)
    assert all(record["bytes"]["down"] < 1000 for record in each)
