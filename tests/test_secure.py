"""Secure aggregation: Flower's SecAgg+ inside a round of ours, over real modifiers at real client apps."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from experiments.inline import InlineGrid
from fedkace_flwr import messages as keys
from fedkace_flwr.config import Config
from fedkace_flwr.errors import MessageError
from fedkace_flwr.outgoing import guarded
from strategies.exchange import exchange
from strategies.secure import mean_update

Make = Callable[..., Config]
NODES = 5
PARAMETERS = frozenset({"conv", "bias"})
SHAPES = {"conv": (40, 30), "bias": (7,), "bn.running_mean": (7,), "bn.running_var": (7,)}
SENT = {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}
COUNTER = {"bn.num_batches_tracked": np.array(10**6, np.int64)}
STEP = 2 * 8.0 / 2**22


def learned(node: int) -> dict[str, np.ndarray]:
    """What a node has learned."""
    random = np.random.default_rng(node)
    return {name: array + random.normal(0, 0.3, array.shape).astype(np.float32) for name, array in SENT.items()}


class Bench:
    """Client apps with made-up local models, and the server's side of the protocol."""

    deadline = 60.0

    def __init__(
        self, lost: dict[str, set[int]] | None = None, sits_out: set[int] = frozenset(), **privacy: Any
    ) -> None:  # type: ignore[assignment]
        config = Config.parse({"secagg": True, **privacy})
        self.lost, self.sits_out = lost or {}, sits_out
        app = ClientApp()

        def guard(message: Message, context: Context, call_next: Any) -> Message:
            return guarded(call_next, config, PARAMETERS)(message, context)

        @app.train(mods=[guard])
        def train(message: Message, context: Context) -> Message:
            client = int(message.content.config_records[keys.CONFIG][keys.CLIENT])  # type: ignore[arg-type]
            if client in self.sits_out:
                return Message(keys.reply_content(None, 0, {keys.SAT_OUT: 1}), reply_to=message)
            return Message(keys.reply_content({**learned(client), **COUNTER}, 3, {}), reply_to=message)

        self.grid = InlineGrid(app, NODES, {}, run_id=1)
        self.masked: dict[int, list[np.ndarray]] = {}
        self.failures: list[tuple[int, str, str]] = []
        self.phases: list[str] = []

    def ask(self, phase: str, questions: list[Message]) -> dict[int, Message]:
        self.phases.append(phase)
        there = {int(m.content.config_records[keys.CONFIG][keys.CLIENT]): m for m in questions}  # type: ignore[arg-type]
        gone = self.lost.get(phase, set())
        return exchange(self.grid, {k: m for k, m in there.items() if k not in gone}, 60).replies

    def trained(self, client: int, reply: Message) -> None:
        blocks = reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
        self.masked[client] = [bytes_to_ndarray(block) for block in blocks]  # type: ignore[union-attr, arg-type]
        assert all(not record for record in reply.content.array_records.values()), "the model itself stays behind"

    def fail(self, client: int, phase: str, error: MessageError) -> None:
        self.failures.append((client, phase, str(error)))

    def mean(self, names: tuple[str, ...] = tuple(SHAPES)) -> list[np.ndarray]:
        questions = []
        for client in range(NODES):
            content = keys.instruction(keys.array_record({**SENT, **COUNTER}), {}, client, 1)
            questions.append(Message(content, dst_node_id=client + 2, message_type=MessageType.TRAIN))
        return mean_update(1, questions, [SHAPES[name] for name in names], 8.0, self)


def plain_mean(clients: set[int]) -> list[np.ndarray]:
    models = [learned(client) for client in clients]
    return [np.mean([model[name] - SENT[name] for model in models], axis=0) for name in SHAPES]


def test_the_sum_is_the_mean_of_the_updates_up_to_a_step() -> None:
    bench = Bench()
    for found, wanted in zip(bench.mean(), plain_mean(set(range(NODES))), strict=True):
        np.testing.assert_allclose(found, wanted, atol=STEP)
    assert bench.phases == ["secagg-setup", "secagg-keys", "training", "secagg-unmask"]
