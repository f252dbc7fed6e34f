"""The server half, over the inline grid with clients that misbehave."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MessageType
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of
from support.faults import FaultyGrid, failed, only, with_array

from experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.aggregation import client_drift, weighted_mean

Make = Callable[..., Config]


def run(config: Config, damage: Callable[[int, int, Message], Message | None]) -> Path:
    server_app.run(FaultyGrid(config, damage), config, run_id=1)
    return Path(config.run.results_dir) / config.run.run_name


FAULTS = {
    "error": (failed, "disk on fire"),
    "nan": (with_array("output.bias", np.full(10, np.nan, dtype=np.float32)), "not finite"),
    "inf": (with_array("output.bias", np.full(10, np.inf, dtype=np.float32)), "not finite"),
    "shape": (with_array("output.bias", np.zeros(11, dtype=np.float32)), "(11,)"),
    "dtype": (with_array("output.bias", np.zeros(10, dtype=np.float64)), "float64"),
    "name": (with_array("surprise", np.zeros(1, dtype=np.float32)), "surprise"),
    "silence": (lambda reply: None, "no reply"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_leaves_the_mean_to_the_others_and_is_named(small: Make, fault: str) -> None:
    act, words = FAULTS[fault]
    deadline = 0.2 if fault == "silence" else 60.0
    config = small(rounds=2, deadline=deadline)
    folder = run(config, only(1, 2, act))
    first, second = rounds_of(folder)
    assert first["failures"] == []
    (failure,) = second["failures"]
    assert failure["client"] == 1 and failure["phase"] == "training" and words in failure["reason"]
    assert second["replay_weights"][1] is None and second["replay_weights"][0] is not None
    assert second["accuracy"] is not None


def test_the_global_model_is_the_plain_mean_of_the_valid_replies(small: Make) -> None:
    sent: dict[int, keys.Reply] = {}
    received: list[dict[str, np.ndarray]] = []
    config = small(rounds=2)

    def watch(number: int, client: int, reply: Message) -> Message:
        if number == 1:
            sent[client] = keys.Reply(client, keys.unpack(reply.content.array_records[keys.ARRAYS]), 1, {})
        return reply

    class Watching(FaultyGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages[0].metadata.message_type == MessageType.EVALUATE:
                received.append(keys.unpack(messages[0].content.array_records[keys.ARRAYS]))
            return super().push_messages(messages)

    server_app.run(Watching(config, watch), config, run_id=1)
    for name, value in received[0].items():
        columns = np.stack([sent[client].weights[name] for client in range(3)]).astype(np.float64)
        assert value.dtype == sent[0].weights[name].dtype
        np.testing.assert_allclose(value, columns.mean(axis=0), rtol=1e-6, atol=1e-7)


def test_below_the_quorum_the_run_stops_with_the_clients_own_words(small: Make) -> None:
    config = small(quorum=0.9)
    with pytest.raises(RunError, match=r"round 2, training: 2 of 3 .*quorum = 0.9.*disk on fire"):
        run(config, only(1, 2, failed))


def test_every_round_is_on_disk_before_the_next_begins(small: Make) -> None:
    config = small(quorum=0.9)
    with pytest.raises(RunError):
        run(config, only(1, 3, failed))
    folder = Path(config.run.results_dir) / config.run.run_name
    assert [record["round"] for record in rounds_of(folder)] == [1, 2]
    assert not (folder / "summary.json").exists()


def test_the_order_of_replies_does_not_matter(small: Make) -> None:
    class Backwards(InlineGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return list(reversed(list(super().pull_messages(message_ids))))

    forward, backward = small(run_name="forward"), small(run_name="backward")
    run_inline(forward)
    server_app.run(Backwards(client_app.app, 3, backward.flat(), run_id=1), backward, run_id=1)
    root = Path(forward.run.results_dir)
    assert rounds_of(root / "forward") == rounds_of(root / "backward")


def test_fewer_supernodes_than_clients_host_them_all_with_the_same_numbers(small: Make) -> None:
    one_each, crowded = small(run_name="one-each"), small(run_name="crowded")
    run_inline(one_each)
    run_inline(crowded, nodes=2)
    root = Path(one_each.run.results_dir)
    assert rounds_of(root / "one-each") == rounds_of(root / "crowded")


def test_client_drift_worked_by_hand() -> None:
    models = [{"w": np.array([1.0, 2.0]), "n": np.array(5)}, {"w": np.array([3.0, 2.0]), "n": np.array(7)}]
    mean = weighted_mean(models, [1, 1])
    assert mean["w"].tolist() == [2.0, 2.0] and mean["n"] == 6 and mean["n"].dtype == np.array(5).dtype
    assert client_drift(models, mean, ["w"]) == pytest.approx(1.0)
    assert weighted_mean(models, [3, 1])["w"].tolist() == [1.5, 2.0]


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.data(),
)
def test_the_mean_lies_between_the_extremes_and_keeps_its_type(rows: list[list[float]], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(rows), max_size=len(rows)))
    mean = weighted_mean([{"w": np.array(row, dtype=np.float32)} for row in rows], weights)["w"]
    columns = np.array(rows, dtype=np.float32)
    assert mean.dtype == np.float32
    assert (mean >= columns.min(0) - 1e-3).all() and (mean <= columns.max(0) + 1e-3).all()
