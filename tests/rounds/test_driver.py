"""The driver of rounds, over the inline grid with clients that misbehave."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MessageType
from support.doubles.faults import Damage, failed, honest, lost, on_training, only, with_array
from support.systems.runs import folder_of, records, run

from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.registry import METHODS
from fedkace_flwr.strategies.base import ServerRule

Make = Callable[..., Config]

FAULTS = {
    "error": (failed, "disk on fire"),
    "nan": (with_array("output.bias", np.full(10, np.nan, dtype=np.float32)), "not finite"),
    "inf": (with_array("output.bias", np.full(10, np.inf, dtype=np.float32)), "not finite"),
    "shape": (with_array("output.bias", np.zeros(11, dtype=np.float32)), "(11,)"),
    "dtype": (with_array("output.bias", np.zeros(10, dtype=np.float64)), "float64"),
    "name": (with_array("surprise", np.zeros(1, dtype=np.float32)), "surprise"),
    "silence": (lost, "did not accept"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_leaves_the_mean_to_the_others_and_is_named(small: Make, fault: str) -> None:
    act, words = FAULTS[fault]
    config = small(rounds=2)
    run(config, only(1, 2, act))
    first, second = records(config)
    assert first["failures"] == []
    (failure,) = second["failures"]
    assert failure["client"] == 1 and failure["phase"] == "training" and words in failure["reason"]
    assert second["replay_weights"][1] is None and second["replay_weights"][0] is not None
    assert second["accuracy"] is not None


def test_the_global_model_is_the_plain_mean_of_the_valid_replies(small: Make) -> None:
    config = small(rounds=2)
    grid = run(config)
    models = [grid.model_returned(1, client) for client in range(3)]
    for name, value in grid.model_sent(MessageType.EVALUATE, 1, 0).items():
        columns = np.stack([model[name] for model in models]).astype(np.float64)
        assert value.dtype == models[0][name].dtype
        np.testing.assert_allclose(value, columns.mean(axis=0), rtol=1e-6, atol=1e-7)


def test_below_the_quorum_the_run_stops_with_the_clients_own_words(small: Make) -> None:
    config = small(quorum=0.9)
    with pytest.raises(RunError, match=r"round 2, training: 2 of 3 .*quorum = 0.9.*disk on fire"):
        run(config, only(1, 2, failed))


def test_every_round_is_on_disk_before_the_next_begins(small: Make) -> None:
    config = small(quorum=0.9)
    with pytest.raises(RunError):
        run(config, only(1, 3, failed))
    assert [record["round"] for record in records(config)] == [1, 2]
    assert not (folder_of(config) / "summary.json").exists()


@pytest.mark.slow
def test_the_order_of_replies_does_not_matter(small: Make) -> None:
    class Backwards(InlineGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return list(reversed(list(super().pull_messages(message_ids))))

    forward, backward = small(run_name="forward"), small(run_name="backward")
    run_inline(forward)
    server_app.run(Backwards(client_app.app, 3, backward.flat(), run_id=1), backward, run_id=1)
    assert records(forward) == records(backward)


@pytest.mark.slow
def test_fewer_supernodes_than_clients_host_them_all_with_the_same_numbers(small: Make) -> None:
    one_each, crowded = small(run_name="one-each"), small(run_name="crowded")
    run_inline(one_each)
    run_inline(crowded, nodes=2)
    assert records(one_each) == records(crowded)


HOOKS = [
    *("begin_round", "model_for", "expected", "check", "compare", "merge", "weight", "drift", "trained", "between"),
    *("training_extras_for", "extras_for", "evaluated", "state"),
]


def hooks_called(config: Config, monkeypatch: pytest.MonkeyPatch, damage: Damage = honest) -> list[str]:
    """Names of the hooks of one run, in the order of their calls; calls for several clients once."""
    called: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        usual = getattr(ServerRule, name)

        def hook(rule: ServerRule, *told: Any) -> Any:
            called.append(name)
            return usual(rule, *told)

        return hook

    rule = type("Noted", (ServerRule,), {name: noted(name) for name in HOOKS})
    monkeypatch.setitem(METHODS, "er", replace(METHODS["er"], server=rule))
    run(config, damage)
    return [name for name, _ in groupby(called)]


def test_a_round_calls_the_hooks_in_the_order_of_the_rules_class(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    called = hooks_called(small(method="er", rounds=1), monkeypatch)
    reading = ["expected", "check"] * 3
    merging = ["compare", "merge", "weight", "drift", "trained", "between"]
    assert called == [
        *("begin_round", "model_for", "training_extras_for", *reading, *merging),
        *("model_for", "extras_for", "evaluated", "state"),
    ]


def test_where_all_sit_out_nothing_is_merged_and_the_rule_hears_of_it(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(number: int, client: int, reply: Message) -> Message:
        reply.__dict__["_content"] = wire.reply_content(None, 0, {wire.SAT_OUT: 1})
        return reply

    called = hooks_called(small(method="er", rounds=1), monkeypatch, on_training(idle))
    assert called[:4] == ["begin_round", "model_for", "training_extras_for", "expected"]
    assert called[4:7] == ["compare", "trained", "model_for"]
    assert not {"check", "merge", "between"} & set(called)
