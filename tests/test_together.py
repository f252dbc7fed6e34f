"""Key ``clients-together``: the inline engine answers several training messages at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import rounds_of
from flwr.app import Message, MessageType

from experiments.inline import InlineGrid, run_inline
from fedkace_flwr import client_app
from fedkace_flwr import messages as keys
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.methods import configured

Make = Callable[..., Config]
_GENTLE = {"learning_rate": 1e-4, "batch_size": 8, "epochs": 2, "overlap": 0}


class Nodes:
    """Three nodes that answer training messages, together or one at a time."""

    def __init__(self, config: Config, together: int) -> None:
        self.grid = InlineGrid(client_app.app, 3, config.flat(), run_id=1, together=together)
        self.weights = as_arrays(Experiment(configured(config)[1]).initial_weights())

    def train(self, round_number: int, clients: tuple[int, ...] = (0, 1, 2)) -> dict[int, Message]:
        """Replies by node, client k asked for at node k + 2 even where that is not its own."""
        sent = []
        for node, client in enumerate(clients):
            content = keys.instruction(keys.array_record(self.weights), {}, client, round_number)
            sent.append(Message(content, dst_node_id=node + 2, message_type=MessageType.TRAIN))
        return {message.metadata.src_node_id: message for message in self.grid.send_and_receive(sent)}

    def replies(self, round_number: int) -> list[keys.Reply]:
        found = self.train(round_number)
        shapes = keys.shapes_of(self.weights)
        return [keys.read_reply(found[node], node - 2, shapes) for node in sorted(found)]


def close(one: keys.Reply, other: keys.Reply) -> None:
    """Two replies up to rounding; a step of this training moves a weight by 1e-4."""
    for name in one.weights:
        np.testing.assert_allclose(one.weights[name], other.weights[name], rtol=1e-2, atol=2e-5, err_msg=name)


def pick(reply: keys.Reply, *names: str) -> list[Any]:
    return [reply.metrics[name] for name in names]


@pytest.mark.parametrize(("method", "step"), [("fedkace", "eager"), ("fedkace", "captured"), ("er", "eager")])
def test_replies_are_those_of_clients_trained_one_at_a_time(
    small: Make, stacks: list[int], method: str, step: str
) -> None:
    apart = Nodes(small(run_name="apart", method=method, **_GENTLE), together=1)
    joined = Nodes(small(run_name="joined", method=method, step=step, **_GENTLE), together=3)
    for number in (1, 2):
        for one, other in zip(apart.replies(number), joined.replies(number), strict=True):
            close(one, other)
            assert one.examples == other.examples == 16
            assert pick(one, keys.BUFFER_SIZE) == pick(other, keys.BUFFER_SIZE)
            if method == "fedkace":
                weights = other.metrics[keys.REPLAY_WEIGHTS]
                assert weights == pytest.approx(one.metrics[keys.REPLAY_WEIGHTS], rel=1e-2)
                assert (weights[1] == 1.0) is (number == 1)
            assert other.metrics[keys.TRAINING_SECONDS] > 0
    assert stacks == [3, 3]


def test_a_whole_run_together(small: Make, stacks: list[int], tmp_path) -> None:
    run_inline(small(run_name="apart", **_GENTLE))
    assert stacks == []
    run_inline(small(run_name="joined", clients_together=2, **_GENTLE))
    assert stacks == [2] * 3  # the third client's block is its own
    apart, joined = rounds_of(tmp_path / "apart"), rounds_of(tmp_path / "joined")
    assert len(apart) == len(joined) == 3
    assert [line["accuracy"] for line in joined] == pytest.approx([line["accuracy"] for line in apart], abs=0.1)


def test_what_is_answered_already_or_fails_leaves_the_others_to_train(small: Make, stacks: list[int]) -> None:
    nodes = Nodes(small(), together=3)
    (first,) = nodes.train(1, (0,)).values()
    replies = nodes.train(1, (0, 2, 2))  # client 2 does not live at the second node
    assert replies[2].content.metric_records == first.content.metric_records
    assert replies[3].has_error() and "client 2 does not live at partition 1" in replies[3].error.reason
    assert replies[4].has_content()
    assert stacks == []
    nodes.train(2, (0, 2, 2))
    assert stacks == [2]


def test_a_loss_that_cannot_be_stacked_trains_alone_to_the_same_bits(small: Make, stacks: list[int]) -> None:
    config = {"replay_gradient": "full", "epochs": 2}
    apart = Nodes(small(run_name="apart", **config), together=1)
    joined = Nodes(small(run_name="joined", **config), together=3)
    for number in (1, 2):
        for one, other in zip(apart.replies(number), joined.replies(number), strict=True):
            assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert stacks == []


@pytest.mark.parametrize("guard", [{"dp": "local"}, {"statistics": "local"}, {"secagg": True}])
def test_guarded_models_are_trained_one_at_a_time(small: Make, guard: dict[str, Any]) -> None:
    assert client_app.trains_together(small(clients_together=2))
    assert not client_app.trains_together(small())
    assert not client_app.trains_together(small(clients_together=2, **guard))


def test_those_that_diverge_reply_with_their_error(small: Make, stacks: list[int]) -> None:
    nodes = Nodes(small(learning_rate=1e30, epochs=3), together=3)
    replies = nodes.train(1)
    assert stacks == [3]
    assert all(reply.has_error() for reply in replies.values())
    assert all("not finite; try a learning-rate below" in reply.error.reason for reply in replies.values())
