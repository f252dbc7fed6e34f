"""AFL: the head is the ridge regression over the union of all data."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType
from support.systems.in_process import Federation
from support.systems.runs import last, records, run

from fedkace_flwr.clients.afl import COUNTED, CROSS, GRAM
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.messaging import wire
from fedkace_flwr.training.loop import features_of

Make = Callable[..., Config]


def closed_form(config: Config, chunks: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """By least squares, over some clients' rounds, with the ridge as further samples."""
    experiment = Experiment(config)
    ids = torch.cat([experiment.chunk(client, number).content for client, number in chunks])
    labels = torch.cat([experiment.chunk(client, number).labels for client, number in chunks])
    net = experiment.network(experiment.initial_weights())
    features = features_of(net, experiment.dataset.fetch, ids, experiment.preprocess).double().numpy()
    classes = np.eye(experiment.num_classes)[labels.numpy()]
    samples = np.concatenate([features, np.eye(features.shape[1])])
    targets = np.concatenate([classes, np.zeros((features.shape[1], classes.shape[1]))])
    head: np.ndarray[Any, Any] = np.linalg.lstsq(samples, targets, rcond=None)[0].T
    return head


def test_the_head_is_the_closed_form_over_all_data_and_the_body_stays(small: Make) -> None:
    config = small(method="afl", away="1:2-2")
    run(config)
    model, start = last(config).weights, as_arrays(Experiment(config).initial_weights())
    wanted = closed_form(config, [(0, 1), (0, 2), (0, 3), (1, 1), (1, 3), (2, 1), (2, 2), (2, 3)])
    assert np.abs(wanted).max() > 0.01
    assert np.abs(model["output.weight"] - wanted).max() < 1e-6 and not model["output.bias"].any()
    assert all(np.array_equal(model[name], start[name]) for name in start if not name.startswith("output."))


def test_what_the_server_has_counted_is_not_sent_again_by_a_client_whose_last_state_is_damaged(small: Make) -> None:
    def crossed(federation: Federation, number: int) -> np.ndarray[Any, Any]:
        fields = {wire.FROZEN: federation.experiment.frozen_digest}
        content = wire.instruction(wire.array_record(federation.weights), fields, 0, number)
        content[COUNTED] = ConfigRecord({COUNTED: number - 1})
        (reply,) = federation.grid.send_and_receive([Message(content, dst_node_id=2, message_type=MessageType.TRAIN)])
        return wire.unpack(reply.content.array_records[wire.ARRAYS])[CROSS]

    usual, damaged = (
        Federation(configured(small(method="afl", rounds=4, run_name=name))[1]) for name in ("usual", "damaged")
    )
    for federation, number in itertools.product((usual, damaged), (1, 2, 3)):
        crossed(federation, number)
    path = damaged.state(0, 3)
    path.write_bytes(path.read_bytes()[:-1])
    assert np.array_equal(crossed(damaged, 4), crossed(usual, 4))


def test_each_sample_counts_once_if_replies_are_lost_and_all_messages_are_repeated(small: Make) -> None:
    """Client 1's replies of rounds 1 and 2 are lost, and those of round 2 are too few at first."""
    config = small(method="afl", quorum=0.6, below_quorum="repeat")
    left = {(1, 1): 1, (2, 1): 2, (2, 0): 1}

    def lose(kind: str, number: int, client: int, reply: Message) -> Message | None:
        if kind != MessageType.TRAIN or not left.get((number, client)):
            return reply
        left[number, client] -= 1
        return None

    run(config, lose)
    assert records(config)[1]["repeated"] == {"training": 1}
    wanted = closed_form(config, [(client, number) for client in range(3) for number in (1, 2, 3)])
    assert np.abs(last(config).weights["output.weight"] - wanted).max() < 1e-6


def test_a_reply_whose_equations_may_have_no_solution_is_rejected(small: Make) -> None:
    config = small(method="afl", quorum=0.5)

    def damage(kind: str, number: int, client: int, reply: Message) -> Message:
        if (kind, number, client) == (MessageType.TRAIN, 2, 0):
            sums = wire.unpack(reply.content.array_records[wire.ARRAYS])
            reply.content[wire.ARRAYS] = wire.array_record({GRAM: -sums[GRAM], CROSS: sums[CROSS]})
        return reply

    run(config, damage)
    (failure,) = records(config)[1]["failures"]
    assert failure["client"] == 0 and GRAM in failure["reason"]
    assert records(config)[2]["failures"] == []


def test_a_fixed_output_layer_is_refused(small: Make) -> None:
    with pytest.raises(ConfigError, match=r"^output-layer = 'simplex': .*; must be 'learned'$"):
        configured(small(method="afl", output_layer="simplex"))


def test_a_body_that_changes_after_the_output_layer_was_solved_for_is_refused(small: Make) -> None:
    with pytest.raises(ConfigError, match=r"^recalibrate-batchnorm = true: .*; must be false$"):
        configured(small(method="afl", recalibrate_batchnorm=True))
