"""Server of TFCL (TagFed; Wang, Liu and Li, CVPR 2024): one upper network per round, and its logits."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict

from fedkace_flwr.clients import tfcl as names
from fedkace_flwr.clients.tfcl import TfclKeys
from fedkace_flwr.compute.devices import choose_device
from fedkace_flwr.config import Config
from fedkace_flwr.data.readers.catalogue import form_asked
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.validation import check_labels, read_metrics
from fedkace_flwr.messaging.wire import NumpyArray, Reply, Shapes, Weights
from fedkace_flwr.networks.catalogue import facts_of, seeded
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.rounds.server_round import TRAINING, ServerRound
from fedkace_flwr.seeding import generator_for, seed_for
from fedkace_flwr.strategies.base import ServerRule
from fedkace_flwr.training.distillation import DistilledLoss
from fedkace_flwr.training.loop import Preprocess, predict, train

logger = logging.getLogger(__name__)

TAIL = "tail"
"""Name of the second exchange in the record."""


class Tfcl(ServerRule):
    """Train the network's upper half on the union of the clients' features, and send each client its samples' logits.

    The upper half of ResNet-18 consists of stages 3 and 4.

    Inferred: all clients of a round form one group. Its network is new each round, and is trained like a client's, by
    the same optimiser on a cosine schedule over ``tfcl-server-epochs``; the loss of a sample is over all classes that its
    sender has met.
    """

    train_action = names.HEAD_ACTION
    aggregates = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._lessons: dict[int, Reply] = {}

    @cached_property
    def _channels_and_side(self) -> tuple[int, int]:
        half = facts_of(self.config.model.network, _blueprint(self.config, 1)).half
        assert half is not None, "networks that cannot be split are refused before the first round"
        return half

    def why_not_longer(self, planned: int, begun: int) -> str:
        """A client's network is divided among the rounds."""
        return "method = 'tfcl' gives each round its share of the network's weights, 1 / rounds"

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return no arrays, because no weights are sent."""
        return ArrayRecord()

    def expected(self, now: ServerRound, content: RecordDict) -> Shapes:
        """Features, logits, labels and classes met, for as many samples as the reply declares.

        Raises
        ------
        MessageError
            The reply declares more samples, or larger feature maps, than are possible.
        """
        record = content.array_records.get(wire.ARRAYS)
        declared = tuple(record[names.FEATURES].shape) if record is not None and names.FEATURES in record else ()
        size, _, height, width = declared if len(declared) == 4 else (0, 0, 0, 0)
        side, most = self._channels_and_side[1], now.limits.examples
        if not (0 <= size <= most and 0 <= height <= side and 0 <= width <= side):
            shown = wire.shown(declared)
            raise MessageError(
                f"{names.FEATURES} are {shown}: at most {most} maps of {side} x {side} are possible", "size"
            )
        single, channels = np.dtype(np.float32), self._channels_and_side[0]
        return {
            names.FEATURES: ((size, channels, height, width), single),
            names.LOGITS: ((size, now.classes), single),
            names.LABELS: ((size,), np.dtype(np.int64)),
            names.SEEN: ((now.classes,), np.dtype(np.bool_)),
        }

    def check(self, now: ServerRound, reply: Reply) -> None:
        """Check the number of samples and their labels.

        Raises
        ------
        MessageError
            The number or the labels contradict the rest of the reply.
        """
        if reply.examples != (size := len(reply.weights[names.FEATURES])):
            raise MessageError(f"{wire.EXAMPLES} = {reply.examples}, but there are features of {size}", "count")
        check_labels(reply.weights[names.LABELS], now.classes, reply.weights[names.SEEN])

    def compare(self, now: ServerRound, replies: Sequence[Reply]) -> list[Reply]:
        """Reject feature maps of an unusual size, and features far larger than others, since one network learns from all."""
        maps = {reply.client: reply.weights[names.FEATURES] for reply in replies}
        sizes = Counter(features.shape[1:] for features in maps.values())
        usual = max(sizes, key=lambda shape: sizes[shape], default=())
        odd = {client for client, features in maps.items() if features.shape[1:] != usual}
        for client in sorted(odd):
            now.fail(client, TRAINING, f"features are {maps[client].shape[1:]}, others' {usual}", "arrays")
        rows = {client: maps[client].reshape(len(maps[client]), -1) for client in maps if client not in odd}
        rejected = odd | now.far_larger(TRAINING, "features", rows)
        return [reply for reply in replies if reply.client not in rejected]

    def merge(self, now: ServerRound, replies: Sequence[Reply]) -> Weights:
        """No arrays: nothing is averaged."""
        return {}

    def drift(self, now: ServerRound, replies: Sequence[Reply], merged: Weights) -> None:
        """Return None, because there is no global model."""

    def trained(self, now: ServerRound, replies: Sequence[Reply]) -> None:
        """Keep the features."""
        self._lessons = {reply.client: reply for reply in replies}

    def between(self, now: ServerRound, arrays: ArrayRecord) -> ArrayRecord:
        """Train the network and send the clients their logits; a client without logits finishes its round without them."""
        try:
            taught = teach(self._lessons, now.classes, self.config, now.number)
        except RunError as error:
            logger.warning("round %d: no distillation, the server's network diverged: %s", now.number, error)
            return arrays
        contents = {
            client: RecordDict({wire.ARRAYS: wire.array_record({names.LOGITS: logits})})
            for client, logits in taught.items()
        }
        if not contents:
            return arrays
        tails = now.ask(TAIL, names.TAIL_ACTION, contents, lambda client, tail: read_metrics(tail, now.limits))
        for client, tail in tails.items():
            head = now.report.trained[client]
            seconds = head.get(wire.TRAINING_SECONDS, 0.0) + tail.get(wire.TRAINING_SECONDS, 0.0)
            now.report.trained[client] = {**head, wire.TRAINING_SECONDS: seconds}
        return arrays

    def lacks_global_model(self) -> str:
        """There is none: no weights are sent."""
        return "its clients send no weights, and each has sub-models of its own"


def _blueprint(config: Config, classes: int) -> Blueprint:
    """The blueprint of a network with the stem for small images, whatever the clients' is: the upper halves are alike."""
    return Blueprint(classes, form_asked(config.data).shape, config.model.width, "cifar")


def teach(lessons: Mapping[int, Reply], classes: int, config: Config, number: int) -> dict[int, NumpyArray]:
    """Train a new upper network on all clients' features and labels, with their logits as teachers.

    Parameters
    ----------
    lessons : mapping of int to Reply
        By client, in any order: ``features`` float32 (n, c, h, w), ``logits`` float32 (n, C), ``labels`` int64
        (n,), ``seen`` bool (C,).
    classes : int
        C.
    config : Config
        The configuration.
    number : int
        The round.

    Returns
    -------
    dict of int to array
        Logits float32 (n, C) of each client's samples, in the client's order.

    Raises
    ------
    RunError
        Training diverges.
    """
    if not lessons:
        return {}
    order, device = sorted(lessons), choose_device(config.run.device)
    features, logits, labels = (
        torch.cat([torch.from_numpy(lessons[client].weights[name]) for client in order])
        for name in (names.FEATURES, names.LOGITS, names.LABELS)
    )
    sizes = [len(lessons[client].weights[names.LABELS]) for client in order]
    seen = torch.stack([torch.from_numpy(lessons[client].weights[names.SEEN]) for client in order])
    objective = DistilledLoss(
        seen.repeat_interleave(torch.tensor(sizes), dim=0).to(device),
        logits.to(device),
        weight=names.LABEL_WEIGHT,
        temperature=names.TEMPERATURE,
    )
    net = _upper_network(classes, config, number, device)
    identity = Preprocess(torch.ones(1, 1, 1, 1, device=device), torch.zeros(1, 1, 1, 1, device=device))
    train(
        net,
        (features, labels),
        (features[:0], labels[:0]),
        objective,
        replace(config.training, epochs=config.of(TfclKeys).tfcl_server_epochs, augment="none"),  # features, not images
        identity,
        generator_for(config.run.seed, "server-batches", number),
    )
    taught = predict(net, torch.Tensor.clone, features, identity)
    if not bool(taught.isfinite().all()):
        raise RunError("its logits are not finite")
    return {client: part.numpy() for client, part in zip(order, torch.split(taught, sizes), strict=True)}


def _upper_network(classes: int, config: Config, number: int, device: torch.device) -> Network:
    seed = seed_for(config.run.seed, "server-weights", number)
    net = seeded(config.model.network, _blueprint(config, classes), seed).upper_half()
    return net.on(device)
