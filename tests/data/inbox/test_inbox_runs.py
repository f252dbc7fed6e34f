"""Whole runs over inboxes, and single messages to a client with one."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from support.common import rounds_of
from support.made.inboxes import RUN, names_in
from support.made.stored import read_state

from fedkace_flwr import __version__, client_app
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.data.images import Framing
from fedkace_flwr.data.readers.catalogue import framing_of
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.report.streams import DrawnStream
from fedkace_flwr.experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.record import title
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.storage.targets import MARK

Make = Callable[..., Config]

DIGITS = ",".join("0123456789")


def at(folder: Path) -> Callable[[int], dict[str, str]]:
    """Where each client's SuperNode finds its data."""
    return lambda client: {
        wire.INBOX: str(folder / f"client-{client}"),
        wire.TEST: str(folder / f"client-{client}" / "test"),
    }


def over_inbox(make: Make, **changes: Any) -> Config:
    bound = 2 * 8
    return make(dataset="inbox", class_names=DIGITS, image_size=8, inbox_bound=bound, normalise=False, **changes)


NOTHING = {wire.EXAMPLES: 0, wire.UNLABELLED: 0, wire.DROPPED: 0, wire.REJECTED: 0}
OTHERS = ["er", "ofcl", "refed", "fedcbdr", "tfcl", "dcfcl"]


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["fedkace", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_run_over_inboxes_is_the_run_over_the_stream(method: str, small: Make, tmp_path: Path) -> None:
    stream = small(run_name="stream", method=method, normalise=False)
    run_inline(stream)
    feed(stream, tmp_path / "data")
    arriving = over_inbox(small, run_name="inbox", method=method)
    run_inline(arriving, node_config=at(tmp_path / "data"))
    lines, wanted = rounds_of(tmp_path / "inbox"), rounds_of(tmp_path / "stream")
    for line in (*lines, *wanted):
        del line["bytes"]  # a device also says how many samples wait
    assert lines == wanted and len(lines) == 3
    ours, theirs = (Checkpoints(tmp_path / name / "server").newest() for name in ("inbox", "stream"))
    assert ours is not None and theirs is not None
    assert all(np.array_equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


@pytest.mark.slow
@pytest.mark.parametrize("after", ["keep", "delete"])
def test_a_run_that_ended_in_its_first_round_goes_on_with_what_its_clients_have_learned(
    small: Make, tmp_path: Path, after: str
) -> None:
    feed(small(), tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "whole")
    config = over_inbox(small, run_name="cut", quorum=1.0, below_quorum="stop", inbox_after=after, resume=True)

    def without_the_last(client: int) -> dict[str, str]:
        return at(tmp_path / "data")(client) if client < 2 else {}

    with pytest.raises(RunError, match="quorum"):
        run_inline(config, node_config=without_the_last)
    run_inline(config, node_config=at(tmp_path / "data"))
    run_inline(over_inbox(small, run_name="uncut"), node_config=at(tmp_path / "whole"))
    assert rounds_of(tmp_path / "cut") == rounds_of(tmp_path / "uncut")


@pytest.fixture
def device(small: Make, tmp_path: Path) -> Iterator[Callable[[str, int], Message]]:
    """Client 0 on a device: ``send(kind, round)``."""
    config = over_inbox(small, rounds=6)
    feed(small(rounds=3), tmp_path / "source")
    weights = as_arrays(Experiment(config).initial_weights())
    shutil.copytree(tmp_path / "source" / "client-0" / "test", tmp_path / "data" / "client-0" / "test")

    def send(kind: str, number: int) -> Message:
        grid = InlineGrid(client_app.app, 3, config.flat(), 1, at(tmp_path / "data"))
        content = wire.instruction(wire.array_record(weights), {wire.RUN: RUN}, 0, number)
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=kind)])
        return reply

    yield send


def told(reply: Message) -> dict[str, Any]:
    """The numbers of a reply, less what it has cost."""
    metrics: dict[str, Any] = dict(reply.content.metric_records[wire.METRICS])
    assert metrics.pop(wire.CPU_SECONDS) >= 0 and metrics.pop(wire.PEAK_MEMORY) > 1
    return metrics


def arrive(tmp_path: Path, number: int) -> None:
    name = f"chunk-{number:06d}.npz"
    shutil.copy(tmp_path / "source" / "client-0" / "new" / name, tmp_path / "data" / "client-0" / "new" / name)


def test_an_empty_inbox_sits_the_round_out_and_goes_on_answering(
    device: Callable[[str, int], Message], tmp_path: Path
) -> None:
    nothing = device(MessageType.TRAIN, 1)
    assert told(nothing) == {**NOTHING, wire.SAT_OUT: 1, wire.WAITING: 0}
    assert not nothing.content.array_records
    assert told(device(MessageType.EVALUATE, 1)) == {**NOTHING, wire.WAITING: 0}

    arrive(tmp_path, 1)
    first = device(MessageType.TRAIN, 2).content.metric_records[wire.METRICS]
    assert first[wire.EXAMPLES] == 16
    before = device(MessageType.EVALUATE, 2).content.metric_records[wire.METRICS]
    assert device(MessageType.TRAIN, 3).content.metric_records[wire.METRICS][wire.SAT_OUT] == 1
    after = device(MessageType.EVALUATE, 3).content.metric_records[wire.METRICS]
    assert after[wire.ACCURACY] == before[wire.ACCURACY] and after[wire.SEEN_CLASSES] == before[wire.SEEN_CLASSES]


def drop_one(tmp_path: Path, name: str, label: int) -> None:
    image = np.random.default_rng(label).integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "data" / "client-0" / "new" / name, images=image, labels=[label])


def test_a_single_image_waits_until_it_can_be_trained_with_another(
    device: Callable[[str, int], Message], tmp_path: Path
) -> None:
    """Batch normalisation over maps of one pixel needs two samples; the buffer may hold the other."""

    def trained(number: int) -> dict[str, Any]:
        return told(device(MessageType.TRAIN, number))

    sat_out = {**NOTHING, wire.SAT_OUT: 1}
    assert trained(1) == {**sat_out, wire.WAITING: 0}
    drop_one(tmp_path, "a.npz", 0)
    for number in (2, 3):
        assert (
            trained(number) == trained(number) == {**sat_out, wire.WAITING: 1}
        )  # a repeated message finds the file, too
        assert told(device(MessageType.EVALUATE, number)) == {**NOTHING, wire.WAITING: 1}
    drop_one(tmp_path, "b.npz", 1)
    assert trained(4)[wire.EXAMPLES] == 2
    drop_one(tmp_path, "c.npz", 2)
    assert trained(5)[wire.EXAMPLES] == 1
    assert trained(6) == {**sat_out, wire.WAITING: 0}
    done = [name for name in names_in(tmp_path / "data" / "client-0") if name.startswith(("taken/", "done/"))]
    assert sorted(Path(name).name for name in done if name.endswith(".npz")) == ["a.npz", "b.npz", "c.npz"]


def test_a_repeated_answer_says_what_it_has_cost_itself(device: Callable[[str, int], Message], tmp_path: Path) -> None:
    device(MessageType.TRAIN, 1)
    arrive(tmp_path, 1)
    first, again = device(MessageType.TRAIN, 2), device(MessageType.TRAIN, 2)
    assert told(first) == told(again)
    spent: Any
    since: Any
    spent, since = (reply.content.metric_records[wire.METRICS][wire.CPU_SECONDS] for reply in (first, again))
    assert 0 <= since < spent, "the answer is stored without what it has cost"
    assert wire.version_in(first) == wire.version_in(device(MessageType.EVALUATE, 2)) == __version__


def test_buffers_on_a_device_hold_pixels(device: Callable[[str, int], Message], tmp_path: Path) -> None:
    device(MessageType.TRAIN, 1)
    arrive(tmp_path, 1)
    device(MessageType.TRAIN, 2)
    content = read_state(tmp_path / "run" / "clients" / "client-000" / "state-000002.npz").buffer.content
    assert content.dtype == torch.uint8 and content.shape[1:] == (3, 8, 8)


def test_without_a_test_folder_no_accuracy_is_reported(small: Make, tmp_path: Path) -> None:
    feed(small(), tmp_path / "data")
    config = over_inbox(small)
    run_inline(config, node_config=lambda client: {wire.INBOX: str(tmp_path / "data" / f"client-{client}")})
    lines = rounds_of(tmp_path / "run")
    assert [line["accuracy"] for line in lines] == [None, None, None]
    assert [line["buffer_size"] for line in lines] == [[16, 16, 16], [18, 18, 18], [20, 20, 20]]
    assert all(gap is not None for gap in lines[0]["gap"])


def test_a_test_folder_that_is_gone_or_holds_other_files_stops_no_training(
    device: Callable[[str, int], Message], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tests = tmp_path / "data" / "client-0" / "test"
    (tests / "scan.tiff").write_bytes(b"II*")
    device(MessageType.TRAIN, 1)  # makes the inbox
    for number, faulty in ((2, "1 files cannot be tested on"), (3, "nothing is tested")):
        arrive(tmp_path, number - 1)
        with caplog.at_level("WARNING"):
            assert device(MessageType.TRAIN, number).content.metric_records[wire.METRICS][wire.EXAMPLES] == 16
            tested = device(MessageType.EVALUATE, number).content.metric_records[wire.METRICS]
        assert (wire.ACCURACY in tested) == (number == 2)
        assert faulty in caplog.text
        shutil.rmtree(tests, ignore_errors=True)


def test_titles_and_summaries_name_what_was_learned(small: Make, tmp_path: Path) -> None:
    feed(small(rounds=1), tmp_path / "data")
    run_inline(over_inbox(small, rounds=1), node_config=at(tmp_path / "data"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["dataset"] == "inbox"
    assert " on inbox: " in title(over_inbox(small))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class-names": "caf\u00e9,cafe\u0301"}, "at least two different names"),
        ({"class-names": ""}, "at least two different names"),
        ({"class-names": "a,a"}, "at least two different names"),
        ({"image-size": 0}, "image-size = 0"),
        ({"capacity": 9}, "capacity = 9: must be at least the number of classes, 10"),
        ({"method": "centralized"}, "keeps all data"),
    ],
)
def test_what_an_inbox_needs_is_asked_for_before_any_round(changes: dict[str, Any], words: str) -> None:
    base = {"dataset": "inbox", "class-names": DIGITS, "image-size": 8}
    configured(Config.parse(base))
    with pytest.raises(ConfigError, match=words):
        configured(Config.parse({**base, **changes}))


def test_a_node_without_an_inbox_says_so(small: Make) -> None:
    config = over_inbox(small)
    grid = InlineGrid(client_app.app, 3, config.flat(), 1, lambda client: {})
    weights = wire.array_record(as_arrays(Experiment(config).initial_weights()))
    message = Message(wire.instruction(weights, {wire.RUN: RUN}, 2, 1), dst_node_id=4, message_type="train")
    (reply,) = grid.send_and_receive([message])
    assert "start the SuperNode with --node-config" in str(reply.error.reason)


def test_feeding_at_intervals_drops_whole_files(small: Make, tmp_path: Path) -> None:
    feed(small(rounds=2), tmp_path, every=0.01)
    files = [name for name in names_in(tmp_path) if name != MARK]
    expected = itertools.product(range(3), ("new/chunk-000001.npz", "new/chunk-000002.npz", "test/test.npz"))
    assert files == sorted(f"client-{client}/{name}" for client, name in expected)


def test_feeding_again_replaces_what_an_earlier_feed_left(small: Make, tmp_path: Path) -> None:
    feed(small(rounds=2), tmp_path)
    (tmp_path / "client-0" / "new" / "mine.npz").write_bytes(b"")
    feed(small(clients=1, rounds=1), tmp_path)
    kept = ["client-0/new/chunk-000001.npz", "client-0/new/mine.npz", "client-0/test/test.npz"]
    assert [name for name in names_in(tmp_path) if name != MARK] == kept


@pytest.mark.slow
def test_what_was_learned_from_inboxes_is_not_called_digits(
    small: Make, tmp_path: Path, pictures: None, caplog: pytest.LogCaptureFixture
) -> None:
    """`dataset`, `window` and `overlap` have defaults, which an inbox ignores."""
    feed(small(), tmp_path / "data")
    config = over_inbox(small, method="er", overlap=2)
    run_inline(config, node_config=at(tmp_path / "data"))
    assert "overlap = 2 has no effect" in caplog.text
    folder = tmp_path / "run"
    assert json.loads((folder / "summary.json").read_text())["dataset"] == "inbox"
    assert title(config) == "er on inbox: 3 clients, M = 20"
    assert main(["report", str(folder), "--output", str(tmp_path / "report")]) == 0
    tables, page = ((tmp_path / "report" / name).read_text() for name in ("tables.md", "index.html"))
    assert "er, inbox, seed 7" in tables.lower() and "finished on inbox" in page
    card = (folder / "model" / "README.md").read_text()
    for text in (tables, page[page.index("<body>") :], card):  # the page without plotly.js
        assert not re.search(r"\bdigits\b|O=\d", text.replace(DIGITS, ""))
    assert "| `window` |" not in card and ">window</td>" not in page


def test_pictures_are_scaled_for_predictions_as_in_an_inbox(small: Make) -> None:
    assert framing_of(over_inbox(small).data, 8) == Framing.of_files(8)


def test_the_stream_of_an_inbox_is_not_drawn(small: Make) -> None:
    with pytest.raises(ConfigError, match="dataset = 'inbox': has no stream to draw"):
        DrawnStream.of(over_inbox(small))
