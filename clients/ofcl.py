"""The client of OFCL: random replay from a memory of the samples that the model is most certain of."""

from dataclasses import replace

import torch
from torch import Tensor

from clients.base import ClientRound, ContinualClient, Metrics
from fedkace_flwr.algorithms.ofcl_memory import bregman_information, most_certain
from fedkace_flwr.algorithms.ofcl_views import VIEWS, View, draw
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods.ofcl import OfclKeys
from fedkace_flwr.samples import Samples
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training.loop import predict
from fedkace_flwr.training.losses import Objective
from fedkace_flwr.training.model import ResNet18
from fedkace_flwr.training.snapshots import move_halfway, restored, snapshot


class OfclClient(ContinualClient):
    """OFCL (Serra and Buettner, "Federated Continual Learning Goes Online", ICLR 2025).

    Each step joins a batch of the chunk with as many uniform draws from the buffer, under plain cross-entropy
    over all classes met. The buffer holds, class by class, the samples whose logits vary least over twelve
    perturbed views (lowest Bregman information, :mod:`fedkace_flwr.algorithms.ofcl_memory`).

    As in the published code only the chunk's classes are scored anew; a class that the chunk lacks keeps the
    scores of its last scoring and can only shrink, ``ofcl-rescore = all`` scores every class. Inferred: each image
    draws its own views (``ofcl-views``; the published code draws once for a batch); a round starts from the global
    model (``ofcl-merge``; the published code starts from the mean of it and the client's own last model, which
    the state then holds too); the server takes the plain mean (``ofcl-aggregation``; the published code's rule, see
    :class:`strategies.ofcl.Ofcl`, needs the class counts of every chunk: labels that then leave the client).
    Inferred, without a key:

    - The method is for streams seen once and updates its memory after every batch; here a chunk is trained for
      several epochs, and the memory is updated once, after the last.
    - The local model scores, in evaluation mode.
    - Views alter the image before it is normalised; flips, perspective and inversion always take place; the
      cut-outs' 10 and 20 pixels are 10/32 and 20/32 of other sizes, around a pixel anywhere in the image.
    - Places that do not divide evenly among the classes are filled, not lost.
    """

    def training_settings(self) -> TrainingConfig:
        """One pass over the chunk per epoch, replay in every step; ``batching`` does not count here."""
        return replace(super().training_settings(), batching="random-replay")  # type: ignore[arg-type]

    def begin(self, net: ResNet18, now: ClientRound) -> None:
        """Meet the client's own last model half-way, where asked for; without one stay with the global model."""
        if self.config.of(OfclKeys).ofcl_merge == "half":
            own = restored("local", now.state.extra, net)
            if own is not None:
                move_halfway(net, own)

    def maintain(self, net: ResNet18, now: ClientRound) -> Samples:
        """Score the chunk's classes by the local model; of each class keep what it is most certain of."""
        candidates = now.state.buffer.followed_by(now.chunk)
        known = now.state.extra.get("information", torch.empty(0, dtype=torch.float64))
        information = torch.cat([known, torch.empty(len(now.chunk), dtype=torch.float64)])
        due = now.current[candidates.labels]
        if self.config.of(OfclKeys).ofcl_rescore == "all":
            due = torch.ones_like(due)
        information[due] = self._information(net, candidates.take(due.nonzero().squeeze(1)), now)
        capacity, generator = self.config.buffer.capacity, self.generator("ofcl-places", now.number)
        kept = most_certain(information, candidates.labels, capacity, generator)
        self.extra = {"information": information[kept]}
        if self.config.of(OfclKeys).ofcl_merge == "half":
            self.extra |= snapshot("local", net.state_dict())
        return candidates.take(kept)

    def report(self, objective: Objective, now: ClientRound) -> Metrics:
        """The chunk's samples of each class, where the server weighs by them; ``report-classes`` does not count here."""
        if self.config.of(OfclKeys).ofcl_aggregation != "class-mean":
            return {}
        return {keys.CHUNK_CLASSES: now.chunk.class_counts(self.experiment.num_classes).tolist()}

    def _information(self, net: ResNet18, samples: Samples, now: ClientRound) -> Tensor:
        """Bregman information, float64 (n,)."""
        each = self.config.of(OfclKeys).ofcl_views == "per-sample"
        numbers = draw(len(samples), self.generator("ofcl-views", now.number), per_sample=each)
        logits = [self._logits_of(view, net, samples, numbers) for view in VIEWS.values()]
        return bregman_information(torch.stack(logits), now.seen)

    def _logits_of(self, view: View, net: ResNet18, samples: Samples, numbers: Tensor) -> Tensor:
        """Logits of one view of each sample, float32 (n, C) on the CPU."""
        device, fetch = self.experiment.device, self.experiment.dataset.fetch

        def seen_by(rows: Tensor) -> Tensor:
            images = samples.take(rows).images(fetch).to(device, torch.float32) / 255
            return view(images, numbers[rows].to(device)) * 255

        return predict(net, seen_by, torch.arange(len(samples)), self.experiment.preprocess)
