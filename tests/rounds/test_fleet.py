"""What the server knows of each device: sums over rounds and days, and what people and programs are shown of it."""

import json
import re
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MessageType
from prometheus_client.parser import text_string_to_metric_families
from support.common import FakeTime
from support.systems.runs import EVALUATE, last, records, run

from fedkace_flwr import __version__, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.living import status_of
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.results.status_page import page
from fedkace_flwr.rounds.fleet import Fleet
from fedkace_flwr.rounds.server_round import RoundReport

from . import test_pace as pace

Make = Callable[..., Config]
pytestmark = pytest.mark.usefixtures("quick")


class Days:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 28, 23, 30, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def reply(client: int, examples: int = 0, **metrics: float) -> Reply:
    named = {name.replace("_", "-"): value for name, value in metrics.items()}
    return Reply(client, {}, examples, named, sat_out=not examples)


def live(fleet: Fleet, number: int, down: int = 100) -> None:
    """A round in which client 0 trains on ten samples, and client 1 has nothing to train on."""
    report = RoundReport(number, (0, 1), down=Counter({0: down, 1: down}), up=Counter({0: 10}), versions={0: "1.2.3"})
    fleet.trained([reply(0, 10, cpu_seconds=2.0, peak_memory=500.0), reply(1, cpu_seconds=0.5)])
    fleet.heard([reply(0, cpu_seconds=1.0, peak_memory=400.0, waiting=3)])
    fleet.add_round(report, {0: 0.75, None: 0.5})


def seats(fleet: Fleet) -> list[dict[str, Any]]:
    members: list[dict[str, Any]] = fleet.described([{"seat": seat, "name": ""} for seat in range(3)])["members"]
    return members


def test_costs_are_those_of_a_round_of_a_day_and_of_all(clock: FakeTime) -> None:
    days = Days()
    fleet = Fleet(days)
    live(fleet, 1)
    live(fleet, 2)
    first, second, third = seats(fleet)
    assert first["cpu_seconds"] == {"round": 3.0, "day": 6.0, "total": 6.0}
    assert first["bytes_down"] == {"round": 100, "day": 200, "total": 200}
    assert (first["trained"], first["learned"], first["waiting"], first["peak_memory"]) == (2, 20, 3, 500.0)
    assert (first["version"], first["prequential_mean"]) == ("1.2.3", 0.75)
    assert second["cpu_seconds"] == {"round": 0.5, "day": 1.0, "total": 1.0}
    assert (second["trained"], second["learned"], second["bytes_up"]["total"]) == (None, 0, 0)
    assert third["trained"] is None and third["waiting"] is None and third["version"] == ""
    days.now += timedelta(hours=1)
    assert seats(fleet)[0]["cpu_seconds"] == {"round": 3.0, "day": 0, "total": 6.0}, "a new day, in UTC"
    live(fleet, 3)
    assert seats(fleet)[0]["cpu_seconds"] == {"round": 3.0, "day": 3.0, "total": 9.0}


def test_a_phase_that_is_repeated_costs_again_and_teaches_once() -> None:
    fleet = Fleet(Days())
    fleet.trained([reply(0, 10, cpu_seconds=2.0)])
    fleet.trained([reply(0, 10, cpu_seconds=0.5)])
    fleet.add_round(RoundReport(1, (0,)), {})
    (device, *_) = seats(fleet)
    assert (device["learned"], device["cpu_seconds"]["round"]) == (10, 2.5)


def test_what_is_known_outlives_the_server_and_names_of_a_later_version() -> None:
    days = Days()
    whole, cut = Fleet(days), Fleet(days)
    for number in (1, 2, 3):
        if number == 2:
            state = json.loads(json.dumps(cut.state()))
            state["devices"]["0"]["further"] = 1
            cut = Fleet(days)
            cut.restore(state)
        for fleet in (whole, cut):
            live(fleet, number)
    assert cut.state() == whole.state() and seats(cut) == seats(whole)


def test_how_often_a_device_was_asked_to_train_outlives_the_server() -> None:
    fleet, again, earlier = Fleet(), Fleet(), Fleet()
    for number, asked in enumerate([(0, 1), (1,), (1, 2)], 1):
        fleet.add_round(RoundReport(number, asked), {})
    assert fleet.most_asked == 3
    again.restore(json.loads(json.dumps(fleet.state())))
    assert again.most_asked == 3
    state = fleet.state()
    for device in state["devices"].values():
        del device["asked"]
    earlier.restore({**state, "last": {"round": 7}})
    assert earlier.most_asked == 7, "a bound for checkpoints of an earlier version"


def test_alarms_are_counted_by_device_and_kind_and_the_last_are_kept() -> None:
    fleet = Fleet(Days())
    for number in range(1, 13):
        report = RoundReport(number, (0,))
        report.alarm("accuracy", number % 2, f"fell in round {number}")
        report.alarm("gate", None, "held")
        fleet.add_round(report, {})
    told = fleet.described([{"seat": 0, "name": ""}])
    assert told["alarms_by_kind"] == {"accuracy": 12, "gate": 12} and len(told["alarms"]) == 10
    assert (told["members"][0]["alarms"], told["members"][0]["alarm"]) == (6, "fell in round 12")


# Whole runs


class Watched(pace.Devices):
    """Devices; ``at_evaluation`` is called at the first evaluation of each round."""

    at_evaluation: Callable[[], None] = staticmethod(lambda: None)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if any(each.metadata.message_type == MessageType.EVALUATE for each in messages):
            self.at_evaluation()
        return super().push_messages(messages)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def fetched(port: int) -> dict[tuple[str, str], float]:
    """The metrics at a port: value by name and seat, or kind."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert families and all(family.documentation and family.type != "unknown" for family in families)
    return {
        (sample.name, sample.labels.get("seat") or sample.labels.get("kind", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_run_shows_its_devices_to_people_and_programs(
    made: Make, tmp_path: Path, clock: FakeTime, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(made("fed"), tmp_path / "source")
    config = pace.living(made, round_interval=3600.0, metrics_port=port)
    folder, inboxes = tmp_path / "living", tmp_path / "inboxes"
    pace.arrive(tmp_path / "source", inboxes, 1)
    second, late, seen = clock.now + 10 * 3600 + 5, clock.now + 15 * 3600 + 5, list[Any]()
    pace.at(clock, second, lambda: pace.arrive(tmp_path / "source", inboxes, 2, [0, 2]))
    pace.at(clock, late, lambda: seen.append((fetched(port), json.loads((folder / "members.json").read_text()))))
    pace.at(clock, late + 10 * 3600, Orders(folder).stop)
    grid = Watched(config, inboxes)
    waits = list[str]()
    grid.at_evaluation = lambda: waits.append(json.loads((folder / "members.json").read_text())["waits_for"])
    server_app.run(grid, config, run_id=1)

    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    status = json.loads((folder / "members.json").read_text())
    assert waits == ["the clients' replies in round 1", "the clients' replies in round 2"]
    assert (status["round"], status["waits_for"]) == (2, "nothing: the run has ended")
    assert status["accuracy"] == records[-1]["accuracy"]
    members = status["members"]
    for way in ("down", "up"):
        assert sum(each[f"bytes_{way}"]["total"] for each in members) == sum(each["bytes"][way] for each in records)
        assert sum(each[f"bytes_{way}"]["round"] for each in members) == records[-1]["bytes"][way]
    assert [each["learned"] for each in members] == [32, 16, 32]
    assert [each["trained"] for each in members] == [2, 1, 2]
    assert members[0]["prequential_accuracy"] == records[-1]["prequential_accuracy"][0]
    assert all(each["version"] == __version__ and each["waiting"] == 0 and each["online"] for each in members)
    assert all(each["cpu_seconds"]["total"] > each["cpu_seconds"]["round"] > 0 for each in members)
    assert all(each["peak_memory"] > 50 for each in members)

    ((metrics, then),) = seen
    assert then["waits_for"] == "samples: 0 of 1 have arrived" or "may begin" in then["waits_for"]
    assert metrics["fedkace_last_round", ""] == 2 and metrics["fedkace_run_info", ""] == 1
    for seat, each in enumerate(members):
        assert metrics["fedkace_device_learned_samples_total", str(seat)] == each["learned"]
        assert metrics["fedkace_device_received_bytes_total", str(seat)] == each["bytes_down"]["total"]
        assert metrics["fedkace_device_online", str(seat)] == 1
        assert metrics["fedkace_device_waiting_samples", str(seat)] == 0
    with pytest.raises(OSError):  # the port is closed with the run
        fetched(port)

    assert main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    rows = [line.split() for line in lines if line.startswith("client ")]
    assert [row[1:6] for row in rows] == [
        [str(seat), str(seat), "online", *each] for seat, each in enumerate([["2", "32"], ["1", "16"], ["2", "32"]])
    ]
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == status
    assert "client 2" in (folder / "status.html").read_text()


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names, self.text = Counter[str](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_strangers_name_is_text_on_the_page_and_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node chooses its name, and an app the version that it reports."""

    def shown(name: str, version: str, text: str) -> tuple[str, str]:
        fleet = Fleet(Days())
        report = RoundReport(1, (0,), down=Counter({0: 1}), versions={0: version})
        report.alarm("accuracy", 0, text)
        fleet.add_round(report, {})
        member = {"seat": 0, "name": name, "online": False, "status": "away", "last": None}
        status = {"run": name, "method": "fedkace", "version": version, "waits_for": text, **fleet.described([member])}
        for path, content in (("environment.json", {"fedkace_flwr": "1"}), ("members.json", status)):
            (tmp_path / path).write_text(json.dumps(content))
        assert main(["status", str(tmp_path)]) == 0
        return page(status), capsys.readouterr().out

    plain, _ = shown("name", "1.2.3", "text")
    hostile, printed = shown("<script>alert(1)</script>", '"><img src=x>', "[red]\x1b[2J</td>&amp;")
    assert Tags(hostile).names == Tags(plain).names and "script" not in Tags(plain).names
    assert "<script>alert(1)</script>" in Tags(hostile).text and "[red]\\x1b[2J</td>&amp;" in Tags(hostile).text
    assert "[red]\\x1b[2J</td>&amp;" in printed and "\x1b" not in printed


def test_a_resumed_run_goes_on_counting(made: Make, tmp_path: Path, clock: FakeTime) -> None:
    feed(made("fed"), tmp_path / "source")
    config, inboxes = pace.living(made, resume=True), tmp_path / "inboxes"
    for number in (1, 2):
        pace.arrive(tmp_path / "source", inboxes, number)
        pace.at(clock, clock.now + 200, Orders(tmp_path / "living").stop)
        server_app.run(pace.Devices(config, inboxes), config, run_id=number)
        Orders(tmp_path / "living").go_on()
    assert [each["learned"] for each in status_of(tmp_path / "living")["members"]] == [32, 32, 32]


@pytest.mark.parametrize("version", [17, "x" * 1000])
def test_numbers_that_are_none_are_refused_and_no_version_is_believed(made: Make, version: Any) -> None:
    def strange(kind: str, number: int, client: int, answer: Message) -> Message:
        if kind == EVALUATE and client == 1:
            answer.content.metric_records[wire.METRICS][wire.WAITING] = [1, 2]
        answer.content[wire.CONFIG] = ConfigRecord({wire.VERSION: version})
        return answer

    config = made(rounds=1)
    run(config, strange)
    (record,) = records(config)
    assert [each["client"] for each in record["failures"]] == [1] and "'waiting'" in record["failures"][0]["reason"]
    assert last(config).record["fleet"]["devices"]["0"]["version"] == ""


def test_a_run_is_watched_until_ctrl_c(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(made(rounds=1))
    looks = iter([None])

    def look(seconds: float) -> None:
        if next(looks, "") is not None:
            raise KeyboardInterrupt
        run(made(rounds=2, resume=True))

    monkeypatch.setattr("fedkace_flwr.experiments.living.time.sleep", look)
    assert main(["status", str(tmp_path / "run"), "--watch"]) == 0
    assert re.search(r"^round +2 *$", capsys.readouterr().out, re.MULTILINE)


def test_of_a_simulation_its_records_are_shown(made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(made(rounds=3, away="2:2-3"))
    assert not (tmp_path / "run" / "members.json").exists()
    status = status_of(tmp_path / "run")
    assert [each["trained"] for each in status["members"]] == [3, 3, 1]
    assert status["members"][0]["accuracy"] is not None and status["round"] == 3
    assert main(["status", str(tmp_path / "run")]) == 0
    assert "client 2" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_port_that_cannot_be_had_is_named_before_any_work(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics-port = {number}: cannot listen at 127.0.0.1:{number}"):
            run(made(metrics_port=number))
    monkeypatch.delitem(sys.modules, "fedkace_flwr.results.exposition")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"metrics-port = 9: .*pip install 'fedkace-flwr\[metrics\]'"):
        run(made(metrics_port=9))
    assert not (tmp_path / "run").exists()
