"""Secure aggregation: Flower's SecAgg+ inside a round of ours, over real modifiers at real client apps."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from support.common import rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError, MessageError, RunError
from fedkace_flwr.experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.travelling import Travelling
from fedkace_flwr.privacy import client_mods
from fedkace_flwr.privacy.client_mods import guarded
from fedkace_flwr.registry import METHODS
from fedkace_flwr.rounds.exchange import exchange
from fedkace_flwr.rounds.secure_aggregation import MaskedSumError, mean_update
from fedkace_flwr.storage.checkpoint import Checkpoints

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
        self, lost: dict[str, set[int]] | None = None, sits_out: AbstractSet[int] = frozenset(), **privacy: Any
    ) -> None:
        config = Config.parse({"secagg": True, **privacy})
        self.lost, self.sits_out = lost or {}, sits_out
        app = ClientApp()

        def guard(message: Message, context: Context, call_next: Any) -> Message:
            return guarded(
                call_next, config, Travelling.of(wire.shapes_of({**SENT, **COUNTER}), PARAMETERS, config).update
            )(message, context)

        @app.train(mods=[guard])
        def train(message: Message, context: Context) -> Message:
            client = int(message.content.config_records[wire.CONFIG][wire.CLIENT])  # type: ignore[arg-type]
            if client in self.sits_out:
                return Message(wire.reply_content(None, 0, {wire.SAT_OUT: 1}), reply_to=message)
            return Message(wire.reply_content({**learned(client), **COUNTER}, 3, {}), reply_to=message)

        self.grid = InlineGrid(app, NODES, {}, run_id=1)
        self.masked: dict[int, list[np.ndarray]] = {}
        self.failures: list[tuple[int, str, str]] = []
        self.phases: list[str] = []

    def ask(self, phase: str, questions: list[Message]) -> dict[int, Message]:
        self.phases.append(phase)
        there = {int(m.content.config_records[wire.CONFIG][wire.CLIENT]): m for m in questions}  # type: ignore[arg-type]
        gone = self.lost.get(phase, set())
        return exchange(self.grid, {k: m for k, m in there.items() if k not in gone}, 60).replies

    def trained(self, client: int, reply: Message) -> bool:
        blocks = reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
        self.masked[client] = [bytes_to_ndarray(block) for block in blocks]  # type: ignore[union-attr, arg-type]
        assert all(not record for record in reply.content.array_records.values()), "the model itself stays behind"
        return client not in self.sits_out

    def fail(self, client: int, phase: str, error: MessageError) -> None:
        self.failures.append((client, phase, str(error)))

    def mean(self, names: tuple[str, ...] = tuple(SHAPES)) -> list[np.ndarray]:
        """The mean of the updates, which there is."""
        found = self.sum_of(names)
        assert found is not None
        return found

    def sum_of(self, names: tuple[str, ...] = tuple(SHAPES)) -> list[np.ndarray] | None:
        questions = []
        for client in range(NODES):
            content = wire.instruction(wire.array_record({**SENT, **COUNTER}), {}, client, 1)
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


@pytest.mark.parametrize(
    ("lost", "left", "failed_before"),
    [
        ({"training": {3}}, {0, 1, 2, 4}, False),
        ({"secagg-setup": {0}}, {1, 2, 3, 4}, True),
        ({"secagg-keys": {4}}, {0, 1, 2, 3}, True),
        ({"secagg-unmask": {2}}, {0, 1, 2, 3, 4}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_client_that_drops_out_is_made_up_for(lost: dict[str, set[int]], left: set[int], failed_before: bool) -> None:
    bench = Bench(lost)
    for found, wanted in zip(bench.mean(), plain_mean(left), strict=True):
        np.testing.assert_allclose(found, wanted, atol=STEP)
    assert (bench.phases.count("secagg-setup") == 2) is failed_before


def test_too_few_clients_make_no_sum() -> None:
    with pytest.raises(MaskedSumError, match="too few clients sent a masked update"):
        Bench({"training": {0, 1, 2}}).mean()
    with pytest.raises(MaskedSumError, match="2 clients exchanged keys, 4 are needed"):
        Bench({"secagg-keys": {0, 1, 2}}).mean()


def test_who_sits_out_adds_nothing_and_is_not_counted() -> None:
    bench = Bench(sits_out={1, 2})
    for found, wanted in zip(bench.mean(), plain_mean({0, 3, 4}), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2 * STEP)
    assert set(bench.masked) == set(range(NODES))


@pytest.mark.parametrize("sits_out", [{1, 2, 4}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}])
def test_a_sum_of_fewer_than_three_updates_is_not_unmasked(sits_out: set[int]) -> None:
    bench = Bench(sits_out=sits_out)
    assert bench.sum_of() is None and bench.phases == ["secagg-setup", "secagg-keys", "training"]


def test_a_masked_update_tells_nothing_and_is_another_each_time() -> None:
    bench, again = Bench(), Bench()
    bench.mean()
    again.mean()
    update = (learned(2)["conv"] - SENT["conv"]).ravel()
    masked, other = bench.masked[2][1].ravel(), again.masked[2][1].ravel()
    limit = 5 / np.sqrt(len(update))
    assert abs(np.corrcoef(update, masked)[0, 1]) < limit
    assert abs(np.corrcoef(masked, other)[0, 1]) < limit
    shares = np.histogram(masked, bins=8, range=(0, 2**32))[0] / len(masked)
    assert np.abs(shares - 1 / 8).max() < 5 / np.sqrt(8 * len(masked)), "uniform over the modulus"
    plain = (np.clip(update, -8, 8) + 8) * 2**22 / 16
    assert abs(np.corrcoef(update, plain)[0, 1]) > 0.99, "the same measure finds what is not masked"


def test_a_masked_update_of_a_wrong_form_is_left_out() -> None:
    bench = Bench()
    ask = bench.ask

    def meddle(phase: str, questions: list[Message]) -> dict[int, Message]:
        replies = ask(phase, questions)
        if phase == "training":
            record = replies[1].content.config_records[RECORD_KEY_CONFIGS]
            record[Key.MASKED_PARAMETERS] = record[Key.MASKED_PARAMETERS][:-1]  # type: ignore[index]
        return replies

    bench.ask = meddle  # type: ignore[method-assign]
    for found, wanted in zip(bench.mean(), plain_mean({0, 2, 3, 4}), strict=True):
        np.testing.assert_allclose(found, wanted, atol=STEP)
    assert bench.failures == [(1, "training", "the reply holds no masked update of the model")]


def test_a_move_beyond_the_range_is_an_error_of_the_client_and_not_cut_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_mods, "SECAGG_RANGE", 0.1)
    bench = Bench()
    with pytest.raises(MaskedSumError):
        bench.mean()
    assert len(bench.failures) == NODES
    assert all("secagg = true allows at most 0.1" in reason for _, _, reason in bench.failures)


def test_statistics_that_stay_at_home_are_not_in_the_sum() -> None:
    privacy: dict[str, Any] = {"batchnorm-statistics": "local"}
    bench = Bench(**privacy)
    names = ("conv", "bias")
    assert [array.shape for array in bench.mean(names)] == [SHAPES[name] for name in names]


def test_a_round_under_secure_aggregation_gives_the_model_of_a_plain_one(small: Make) -> None:
    models = []
    for name, told in (("plain", {}), ("masked", {"secagg": True})):
        config = small(run_name=name, rounds=1, **told)
        run_inline(config)
        found = Checkpoints(Path(config.run.results_dir) / name / "server").newest()
        assert found is not None
        models.append(found.weights)
    plain, masked = models
    for name in plain:
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(masked[name], plain[name], atol=STEP + 1e-6, err_msg=name)
    (record,) = rounds_of(Path(config.run.results_dir) / "masked")
    assert record["client_drift"] is None and not record["failures"]


def test_methods_and_sizes_that_secure_aggregation_cannot_serve_are_refused(small: Make) -> None:
    assert {name for name, method in METHODS.items() if method.is_mean} >= {"fedkace", "fedavg"}
    with pytest.raises(ConfigError, match=r"^secagg = true with method = 'tfcl': its server needs more than the mean"):
        configured(small(method="tfcl", secagg=True))
    with pytest.raises(ConfigError, match=r"^secagg = true with method = 'lkc': its server needs more than the mean"):
        configured(small(method="lkc", secagg=True))
    with pytest.raises(ConfigError, match=r"^clients = 2: with secagg = true, must be between 3"):
        small(clients=2, secagg=True)


def test_two_clients_at_one_node_are_refused(small: Make) -> None:
    with pytest.raises(RunError, match="3 clients at 2 SuperNodes; secagg needs one for each"):
        run_inline(small(secagg=True), nodes=2)
