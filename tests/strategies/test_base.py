"""Server rules: hooks with defaults."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from flwr.app import ArrayRecord, MessageType

from fedkace_flwr.config import Config
from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.strategies.base import ServerRule


def test_by_default_every_client_weighs_the_same_and_gets_the_global_model(small: Callable[..., Config]) -> None:
    rule, arrays = ServerRule(small()), ArrayRecord()
    replies = [Reply(client, {"w": np.array([value])}, 10**client, {}) for client, value in enumerate([1.0, 2.0, 6.0])]
    now = SimpleNamespace(parameters=frozenset({"w"}))
    assert rule.merge(now, replies)["w"].tolist() == [3.0]  # type: ignore[arg-type]
    assert rule.model_for(2, arrays) is rule.between(None, arrays) is arrays  # type: ignore[arg-type]
    assert rule.extras_for(0) == {} and rule.state() == ({}, {}) and rule.train_action == MessageType.TRAIN
    assert rule.summary() == f"{rule.config.method} over 3 clients"
