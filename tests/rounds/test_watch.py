"""Alarms for prequential accuracy that falls."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.systems.cut_off import cut_after_round
from support.systems.runs import folder_of, ran, records

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.rounds.watch import Watch

Make = Callable[..., Config]


def told(accuracies: Mapping[int, float | None], samples: int = 16) -> dict[int, dict[str, Any]]:
    """Training metrics of a round."""
    return {
        client: {}
        if accuracy is None
        else {wire.PREQUENTIAL_ACCURACY: accuracy, wire.PREQUENTIAL_SAMPLES: float(samples)}
        for client, accuracy in accuracies.items()
    }


def test_the_clients_and_all_are_watched_each_by_itself() -> None:
    watch = Watch()
    for _ in range(15):
        assert watch.take(told({0: 0.9, 1: 0.5}) | told({2: 0.8}, samples=32)) == {}
    assert watch.means() == pytest.approx({0: 0.9, 1: 0.5, 2: 0.8, None: 0.75})
    found = [watch.take(told({0: 0.9, 1: 0.4}) | told({2: 0.0}, samples=32)) for _ in range(3)]
    assert [list(texts) for texts in found] == [[], [], [2, None]]
    assert "0% of 32" in found[-1][2] and "80%" in found[-1][2] and "32% of 64" in found[-1][None]


def test_who_tests_nothing_is_left_as_it_was() -> None:
    watch = Watch()
    for _ in range(15):
        watch.take(told({0: 0.9, 1: 0.8}))
    before = watch.state()
    assert watch.take(told({0: None})) == {} and watch.take({}) == {} and watch.take(told({1: 0.0}, samples=0)) == {}
    assert watch.state() == before
    watch.take(told({1: 0.9}))
    assert watch.state()[0] == before[0]


def test_a_restored_watch_goes_on() -> None:
    rounds = [told({0: 0.9, 1: 0.5})] * 14 + [told({0: 0.2, 1: 0.5})] * 6 + [told({0: 0.9, 1: None})] * 15
    whole = Watch()
    expected = [whole.take(each) for each in rounds]
    assert any(expected)
    watch = Watch()
    for each, texts in zip(rounds, expected, strict=True):
        state = json.loads(json.dumps(watch.state()))
        watch = Watch()
        watch.restore(state)
        assert watch.take(each) == texts
    assert watch.means() == whole.means()


# Real runs

LAST_GOOD = 18


def long(made: Make, **changes: Any) -> Config:
    stream = {"stream": "dirichlet:100", "samples_per_class": 16, "capacity": 40}
    return made(method="er", network="cnn", width=8, clients=3, rounds=24, epochs=3, **stream, **changes)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_swapped_labels_raise_an_alarm_for_their_client_alone(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bell = tmp_path / "bell"
    bell.write_text(
        f"#!/bin/sh\ncat >> {tmp_path}/told; echo >> {tmp_path}/told; wc -l < $1/rounds.jsonl >> {tmp_path}/told\n"
    )
    bell.chmod(0o755)
    config = long(made, attack=f"brief-label-flip:{LAST_GOOD + 1}", on_alarm=f"{bell} {tmp_path}/run")
    found = ran(config)
    (alarm,) = (alarm for record in found for alarm in record.get("alarms", ()))
    assert alarm["client"] == 2 and alarm["kind"] == "accuracy" and LAST_GOOD + 3 <= alarm["round"] <= 24
    assert [record["round"] for record in found if "alarms" in record] == [alarm["round"]]
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert summary["alarms"] == 1
    line, lines = (tmp_path / "told").read_text().splitlines()
    assert json.loads(line) == {"folder": str(tmp_path / "run"), "alarms": [alarm | {"name": ""}]}
    assert int(lines) == alarm["round"], "the round is in its file by then"

    resumed = long(made, name="cut", attack=f"brief-label-flip:{LAST_GOOD + 1}", resume=True)
    cut_after_round(resumed, alarm["round"] - 1, monkeypatch)
    run_inline(resumed)
    assert records(resumed) == found


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_an_honest_run_raises_none(made: Make) -> None:
    config = long(made)
    assert not any("alarms" in record for record in ran(config))
    assert "alarms" not in json.loads((folder_of(config) / "summary.json").read_text())


@pytest.mark.usefixtures("quick")
def test_a_command_that_does_not_exist_ends_the_run_before_it_begins(made: Make) -> None:
    config = made(on_alarm="no-such-program")
    with pytest.raises(ConfigError, match="on-alarm = 'no-such-program'"):
        run_inline(config)
    assert not folder_of(config).exists()
