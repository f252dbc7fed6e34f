"""The server of TFCL (TagFed; Wang, Liu and Li, CVPR 2024): one upper network a round, and its logits."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import DATASETS
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging import validation as plausibility
from fedkace_flwr.messaging.records import Reply, Shapes
from fedkace_flwr.methods import tfcl as names
from fedkace_flwr.methods.tfcl import TfclKeys
from fedkace_flwr.rounds.vetting import TRAINING
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.seeding import generator_for, seed_for
from fedkace_flwr.training.devices import choose_device
from fedkace_flwr.training.distillation import DistilledLoss, upper_half
from fedkace_flwr.training.loop import Preprocess, predict, train
from fedkace_flwr.training.model import ResNet18, seeded_resnet18
from strategies.base import ContinualStrategy, logger

TAIL = "tail"


class Tfcl(ContinualStrategy):
    """Train stages 3 and 4 on the union of the clients' features, and send each client its samples' logits.

    Inferred: all clients of a round are one group (``tfcl-group``; ``class-overlap``: those are whose chunks' class
    sets have a Jaccard index of at least ``tfcl-group-jaccard``, or who are linked through others; each round's
    record then holds the ``groups``); a group's network is new each round, and every group's starts alike; it is
    trained like a client, AdamW on a cosine over ``tfcl-server-epochs``; each sample over all classes that its
    sender has met.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lessons: dict[int, Reply] = {}

    def model_for(self, client: int, arrays: ArrayRecord) -> ArrayRecord:
        """No weights travel."""
        return ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask each client for the first half of its round."""
        return self._instructions(names.HEAD_ACTION, server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Collect features; nothing is averaged.

        Raises
        ------
        RunError
            Too few valid replies for the quorum.
        """
        lessons: dict[int, Reply] = {}
        for message in replies:
            client = self._asked[message.metadata.reply_to_message_id]
            try:
                lessons[client] = self._checked(TRAINING, self._lesson(message, client))
            except MessageError as error:
                self._fail(client, TRAINING, str(error), error.kind)
        taught = [reply for reply in lessons.values() if not reply.sat_out]
        shapes = Counter(reply.weights[names.FEATURES].shape[1:] for reply in taught)
        usual = max(shapes, key=lambda shape: shapes[shape], default=())
        for reply in taught:
            if (shape := reply.weights[names.FEATURES].shape[1:]) != usual:
                del lessons[reply.client]
                self._fail(reply.client, TRAINING, f"features are {shape}, others' {usual}", "arrays")
        for client in self._far_out([reply for reply in taught if reply.client in lessons]):
            del lessons[client]
        valid = [lessons[client] for client in sorted(lessons)]
        self.require(TRAINING, valid)
        self._lessons = {reply.client: reply for reply in valid if not reply.sat_out}
        self._report.trained = {client: reply.metrics for client, reply in self._lessons.items()}
        return (ArrayRecord(), None) if self._lessons else (None, None)

    def between(self, number: int, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Learn from all of a group, teach each; a client without an answer ends its round by itself."""
        contents = {}
        for group in self._groups():
            lessons = {client: self._lessons[client] for client in group}
            try:
                taught = teach(lessons, self._classes, self.config, number)
            except RunError as error:
                logger.warning("round %d: no distillation, the server's network diverged: %s", number, error)
                continue
            for client, logits in taught.items():
                contents[client] = RecordDict({keys.ARRAYS: keys.array_record({names.LOGITS: logits})})
        if not contents:
            return arrays
        for client, content in self.ask(grid, TAIL, names.TAIL_ACTION, number, contents).items():
            head = self._report.trained[client]
            try:
                keys.check_size(content, {})
                tail = keys.checked_metrics(content.metric_records.get(keys.METRICS, MetricRecord()))
                plausibility.check_metrics(tail, self.vetting.limits)
            except MessageError as error:
                self._fail(client, TAIL, str(error), error.kind)
                continue
            total = head.get(keys.TRAINING_SECONDS, 0.0) + tail.get(keys.TRAINING_SECONDS, 0.0)
            self._report.trained[client] = {**head, keys.TRAINING_SECONDS: total}
        return arrays

    def _far_out(self, taught: Sequence[Reply]) -> set[int]:
        """Clients whose features are far larger than the others': one network is to learn from all."""
        if self.config.run.norm_bound == 0:
            return set()
        features = {reply.client: reply.weights[names.FEATURES].reshape(reply.examples, -1) for reply in taught}
        lengths = {client: {"features": plausibility.root_mean_square(rows)} for client, rows in features.items()}
        return self.far_out(TRAINING, dict.fromkeys(lengths, 1), lengths)

    def _groups(self) -> list[list[int]]:
        """Who learns from whom."""
        settings = self.config.of(TfclKeys)
        if settings.tfcl_group == "round":
            return [sorted(self._lessons)]
        held = {client: frozenset(reply.weights[names.LABELS].tolist()) for client, reply in self._lessons.items()}
        groups = linked(held, settings.tfcl_group_jaccard)
        self._report.own["groups"] = groups
        return groups

    @property
    def _classes(self) -> int:
        return self._shapes["output.bias"][0][0]

    def _lesson(self, message: Message, client: int) -> Reply:
        record = None if message.has_error() else message.content.array_records.get(keys.ARRAYS)
        declared = tuple(record[names.FEATURES].shape) if record is not None and names.FEATURES in record else ()
        size, _, height, width = declared if len(declared) == 4 else (0, 0, 0, 0)
        side = largest_map(self.config.data)
        if not (0 <= size <= self.vetting.limits.examples and 0 <= height <= side and 0 <= width <= side):
            raise MessageError(
                f"{names.FEATURES} are {keys.shown(declared)}: at most {self.vetting.limits.examples} samples' maps of "
                f"{side} x {side} can be",
                "size",
            )
        single, channels = np.dtype(np.float32), 2 * self.config.model.width
        shapes: Shapes = {
            names.FEATURES: ((size, channels, height, width), single),
            names.LOGITS: ((size, self._classes), single),
            names.LABELS: ((size,), np.dtype(np.int64)),
            names.SEEN: ((self._classes,), np.dtype(np.bool_)),
        }
        reply = keys.read_reply(message, client, shapes)
        if reply.sat_out:
            return reply
        if reply.examples != size:
            raise MessageError(f"{keys.EXAMPLES} = {reply.examples}, but there are features of {size}", "count")
        labels, seen = reply.weights[names.LABELS], reply.weights[names.SEEN]
        if labels.min() < 0 or labels.max() >= self._classes or not seen[labels].all():
            raise MessageError("labels hold a class that the client has not met")
        return reply


def largest_map(data: DataConfig) -> int:
    """Height and width that a map after the second stage can have at most: half the image's, whatever the stem."""
    return -(-(data.image_size or DATASETS[data.dataset].image_size) // 2)


def linked(sets: Mapping[int, frozenset[int]], threshold: float) -> list[list[int]]:
    """Group who has much in common, or is linked by a chain of such.

    Parameters
    ----------
    sets : mapping of int to frozenset
        Non-empty, by client.
    threshold : float
        Jaccard index, elements of both of all elements of either, from which on two are linked; in [0, 1].

    Returns
    -------
    list of list of int
        Clients in ascending order, groups by their first.
    """
    groups: list[list[int]] = []
    for client in sorted(sets):
        own = sets[client]
        near = [g for g in groups if any(len(own & sets[o]) / len(own | sets[o]) >= threshold for o in g)]
        groups = [g for g in groups if g not in near] + [sorted([client, *chain.from_iterable(near)])]
    return sorted(groups)


def teach(lessons: Mapping[int, Reply], classes: int, config: Config, number: int) -> dict[int, keys.NumpyArray]:
    """Train a new upper network on all clients' features and labels, with their logits as teachers.

    Parameters
    ----------
    lessons : mapping of int to Reply
        By client, in any order: ``features`` float32 (n, 2 x width, h, w), ``logits`` float32 (n, C), ``labels`` int64
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
        Logits float32 (n, C) of each client's samples, in its own order.

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
        weight=config.of(TfclKeys).tfcl_label_weight,
        temperature=config.of(TfclKeys).tfcl_temperature,
        kind=config.of(TfclKeys).tfcl_loss,
    )
    net = _upper_network(classes, config, number, device)
    as_they_are = Preprocess(torch.ones(1, 1, 1, 1, device=device), torch.zeros(1, 1, 1, 1, device=device))
    train(
        net,
        (features, labels),
        (features[:0], labels[:0]),
        objective,
        replace(config.training, epochs=config.of(TfclKeys).tfcl_server_epochs),
        as_they_are,
        generator_for(config.run.seed, "server-batches", number),
    )
    taught = predict(net, torch.Tensor.clone, features, as_they_are)
    if not bool(taught.isfinite().all()):
        raise RunError("its logits are not finite")
    return {client: part.numpy() for client, part in zip(order, torch.split(taught, sizes), strict=True)}


def _upper_network(classes: int, config: Config, number: int, device: torch.device) -> ResNet18:
    net = seeded_resnet18(classes, config.model.width, "cifar", seed_for(config.run.seed, "server-weights", number))
    return upper_half(net).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
