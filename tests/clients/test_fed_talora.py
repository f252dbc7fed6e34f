"""Fed-TaLoRA: the global model is exactly the mean of the local ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from support.doubles.faults import only, with_array
from support.systems.runs import EVALUATE, TRAIN, records, run

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.networks.lora import UP, adapted, merged

Make = Callable[..., Config]


def test_the_global_model_is_the_mean_of_the_local_ones(small: Make) -> None:
    """By numbers of samples; one reply is lost, and its client goes on from the same model as the others."""
    config = small(method="fed-talora", label_share=0.6, quorum=0.5, lora_rank=2, learning_rate=0.02, epochs=3)
    lost = (2, 1)

    def lose(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return None if kind == TRAIN and (number, client) == lost else reply

    grid, experiment = run(config, lose), Experiment(config)
    names = adapted(grid.model_sent(TRAIN, 1, 0).keys())
    assert len(names) > 3 and not any(record["failures"] for record in records(config)[::2])
    for number in (1, 2, 3):
        clients = [client for client in range(3) if (number, client) != lost]
        counts = [len(experiment.chunk(client, number)) for client in clients]
        assert len(set(counts)) > 1
        replies = [grid.model_returned(number, client) for client in clients]
        assert not any(names & reply.keys() for reply in replies)
        before, after = grid.model_sent(TRAIN, number, 1), grid.model_sent(EVALUATE, number, 1)
        models = [merged({**before, **reply}) for reply in replies]
        for name, array in merged(after).items():
            wanted = np.average([model[name].astype(np.float64) for model in models], axis=0, weights=counts)
            assert np.abs(array - wanted).max() < 1e-6
        assert all(np.abs(before[name] - after[name]).max() > 1e-5 for name in names)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"trainable": "norm"}, r"^trainable = 'norm': method = 'fed-talora' sets it to 'lora'"),
        ({"aggregation": "median"}, r"^aggregation = 'median' .*; must be 'mean'$"),
        ({"server_optimiser": "adam"}, r"^server-optimiser = 'adam' .*; must be 'none'$"),
        ({"secagg": True}, r"^secagg = true .* more than the mean"),
    ],
)
def test_what_only_a_plain_mean_permits_is_refused(small: Make, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(small(method="fed-talora", **keys))


def test_adapters_whose_product_is_infinite_are_rejected(small: Make) -> None:
    config = small(method="fed-talora", quorum=0.5, rounds=2)
    replied = Experiment(configured(config)[1]).travelling.replied
    name = next(each for each in replied if each.endswith(UP))
    run(config, only(0, 1, with_array(name, np.full(replied[name][0], 3e38, np.float32))))
    first, second = records(config)
    assert [(each["client"], UP in each["reason"]) for each in first["failures"]] == [(0, True)]
    assert second["failures"] == []
