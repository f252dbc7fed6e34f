"""The client of OFCL: random replay from a memory of the samples that the model is most certain of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from clients.base import ClientRound, ClientRule, Kept, Metrics, Training
from fedkace_flwr.algorithms.ofcl_memory import bregman_information, most_certain
from fedkace_flwr.algorithms.ofcl_views import VIEWS, View, draw
from fedkace_flwr.config import Config
from fedkace_flwr.keys import key
from fedkace_flwr.messaging.metrics import Bound, Metric
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.samples import Samples
from fedkace_flwr.training.loop import predict
from fedkace_flwr.training.snapshots import move_halfway, restored, snapshot

CHUNK_CLASSES = "chunk-classes"
"""Name of the metric: number of samples of each class in the chunk."""


@dataclass(frozen=True)
class OfclKeys:
    """OFCL."""

    ofcl_views: Literal["per-sample", "per-batch"] = key(
        "per-sample",
        "Inferred: draw the parameters of the 12 views for each image (`per-sample`), or once for all images, as the published code does (`per-batch`).",
    )
    ofcl_rescore: Literal["current", "all"] = key(
        "current", "Inferred: rescore only the chunk's classes each round (`current`), or all classes (`all`)."
    )
    ofcl_merge: Literal["global", "half"] = key(
        "global",
        "Inferred: a client starts its round from the global model (`global`), or from the midpoint between it and the client's own last local model, as in the published code (`half`).",
    )
    ofcl_aggregation: Literal["mean", "class-mean"] = key(
        "mean",
        "Inferred: aggregate by the mean of the local models (`mean`), or by the midpoint between the previous global model and the mean of one model per class, as in the published code (`class-mean`). For `class-mean`, clients report the class counts of their chunks regardless of `report-classes`.",
    )


def samples(config: Config, round_number: int) -> int:
    """Count the samples of an epoch: the chunk and, once there is a buffer, an equal number drawn from it."""
    return config.mean_chunk * (2 if round_number > 1 else 1)


METRICS = (
    Metric(
        CHUNK_CLASSES,
        "OFCL: number of samples of each class in the chunk; reported only with `ofcl-aggregation = class-mean`.",
        high=Bound("samples of a chunk", lambda limits: limits.examples),
        whole=True,
        length="classes",
        unit="samples",
    ),
)


class OfclClient(ClientRule):
    """OFCL (Serra and Buettner, "Federated Continual Learning Goes Online", ICLR 2025).

    Each step joins a batch of the chunk with as many uniform draws from the buffer, with plain cross-entropy over
    all classes seen. For each class, the buffer holds the samples whose logits vary least over twelve perturbed
    views (lowest Bregman information, :mod:`fedkace_flwr.algorithms.ofcl_memory`).

    As in the published code, only the chunk's classes are scored again; a class that is absent from the chunk keeps
    its last scores and can only shrink (``ofcl-rescore = all`` scores every class). Inferred: each image draws its
    own views (``ofcl-views``; the published code draws once per batch); a round starts from the global model
    (``ofcl-merge``; the published code starts from the mean of it and the client's own last model, which is then
    part of the state); the server takes the plain mean (``ofcl-aggregation``; the published code's rule, see
    :class:`strategies.ofcl.Ofcl`, needs the class counts of every chunk, so that labels leave the client).
    Inferred, without a key:

    - The method is designed for streams seen once and updates its memory after every batch; here a chunk is trained
      for several epochs, and the memory is updated once, after the last.
    - The local model scores, in evaluation mode.
    - Views alter the image before normalisation; flips, perspective and inversion always take place; the cut-outs
      of 10 and 20 pixels become 10/32 and 20/32 of other image sizes, around any pixel of the image.
    - Places that do not divide evenly among the classes are filled.
    """

    def begin(self, net: Network, now: ClientRound) -> None:
        """With ``ofcl-merge = half``, move half-way from the global model to the client's own last one, if any."""
        if self.config.of(OfclKeys).ofcl_merge == "half":
            own = restored("local", now.state.extra, net)
            if own is not None:
                move_halfway(net, own)

    def training(self, net: Network, now: ClientRound) -> Training:
        """One pass over the chunk per epoch, with replay in every step; the key ``batching`` is ignored."""
        return replace(super().training(net, now), batching="random-replay")

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Score the chunk's classes with the local model; keep the samples of each class that it is most certain of."""
        net = training.net
        candidates = now.state.buffer.followed_by(now.chunk)
        known = now.state.extra.get("information", torch.empty(0, dtype=torch.float64))
        information = torch.cat([known, torch.empty(len(now.chunk), dtype=torch.float64)])
        due = now.current[candidates.labels]
        if self.config.of(OfclKeys).ofcl_rescore == "all":
            due = torch.ones_like(due)
        information[due] = self._information(net, candidates.take(due.nonzero().squeeze(1)), now)
        capacity, generator = self.config.buffer.capacity, self.generator("ofcl-places", now.number)
        kept = most_certain(information, candidates.labels, capacity, generator)
        extra = {"information": information[kept]}
        if self.config.of(OfclKeys).ofcl_merge == "half":
            extra |= snapshot("local", net.state_dict())
        return Kept(candidates.take(kept), extra)

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Also the chunk's class histogram if the server weighs by it, whatever ``report-classes`` says."""
        report = super().report(now, training, kept)
        if self.config.of(OfclKeys).ofcl_aggregation == "class-mean":
            report[CHUNK_CLASSES] = now.chunk.class_counts(self.experiment.num_classes).tolist()
        return report

    def _information(self, net: Network, samples: Samples, now: ClientRound) -> Tensor:
        """Bregman information, float64 (n,)."""
        each = self.config.of(OfclKeys).ofcl_views == "per-sample"
        numbers = draw(len(samples), self.generator("ofcl-views", now.number), per_sample=each)
        images = self.resident(samples)
        logits = [self._logits_of(view, net, images, numbers) for view in VIEWS.values()]
        return bregman_information(torch.stack(logits), now.seen)

    def _logits_of(self, view: View, net: Network, images: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
        """Logits of one view of each sample, float32 (n, C) on the experiment's device."""
        device = self.experiment.device

        def seen_by(rows: Tensor) -> Tensor:
            pixels = images(rows).to(device, torch.float32) / 255
            return view(pixels, numbers[rows].to(device)) * 255

        return predict(net, seen_by, torch.arange(len(numbers)), self.experiment.preprocess, home=False)


METHOD = Method(OfclClient, "OFCL", server="strategies.ofcl:Ofcl", keys=(OfclKeys,), metrics=METRICS, samples=samples)
