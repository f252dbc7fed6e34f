"""Replies as Flower delivers them."""

from collections.abc import Callable

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire

WEIGHTS: dict[str, np.ndarray] = {
    "conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bn.num_batches_tracked": np.array(5, dtype=np.int64),
    "bn.bias": np.array([0.5, -0.5], dtype=np.float32),
}


def ask(answer: Callable[[Message], RecordDict]) -> Message:
    """Send one training message to a node with this ``answer``; if that raises, the reply is an error."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(answer(message), reply_to=message)

    grid = InlineGrid(app, 1, {}, run_id=7)
    content = wire.instruction(wire.array_record(WEIGHTS), {}, client=0, round_number=1)
    (reply,) = grid.send_and_receive([grid.create_message(content, MessageType.TRAIN, dst_node_id=2, group_id="1")])
    return reply


def ask_with(content: RecordDict) -> Message:
    return ask(lambda message: content)
