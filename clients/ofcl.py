"""The client of OFCL: random replay from a memory of the samples that the model is most certain of."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedkace_flwr.algorithms.ofcl_memory import bregman_information, most_certain
from fedkace_flwr.algorithms.ofcl_views import ARRAY_VIEWS, VIEWS, View, draw
from fedkace_flwr.clients.base import ClientRound, ClientRule, Kept, Training
from fedkace_flwr.config import Config
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.samples import Samples
from fedkace_flwr.training.loop import Preprocess, predict
from fedkace_flwr.training.stored_logits import identities


def samples(config: Config, round_number: int) -> int:
    """Count the samples of an epoch: the chunk and, once there is a buffer, an equal number drawn from it."""
    return config.mean_chunk * (2 if round_number > 1 else 1)


class OfclClient(ClientRule):
    """OFCL (Serra and Buettner, "Federated Continual Learning Goes Online", ICLR 2025).

    Each step joins a batch of the chunk with as many uniform draws from the buffer, with plain cross-entropy over
    all classes seen. For each class, the buffer holds the samples whose logits vary least over twelve perturbed
    views (lowest Bregman information, :mod:`fedkace_flwr.algorithms.ofcl_memory`).

    As in the published code, only the chunk's classes are scored again; a class that is absent from the chunk keeps
    its last scores and can only shrink. Inferred:

    - Each image draws its own views; the published code draws once per batch.
    - A round starts from the global model; the published code starts from the mean of it and the client's own last
      model.
    - The server takes the plain mean; the published code's rule needs the class counts of every chunk, so that labels
      would leave the client.
    - The method is designed for streams seen once and updates its memory after every batch; here a chunk is trained
      for several epochs, and the memory is updated once, after the last.
    - The local model scores, in evaluation mode.
    - Views alter the image before normalisation; flips, perspective and inversion always take place; the cut-outs
      of 10 and 20 pixels become 10/32 and 20/32 of other image sizes, around any pixel of the image. Arrays have views
      of their own (:data:`~fedkace_flwr.algorithms.ofcl_views.ARRAY_VIEWS`), after normalisation.
    - Places that do not divide evenly among the classes are filled.
    """

    def training(self, net: Network, now: ClientRound) -> Training:
        """One pass over the chunk per epoch, with replay in every step; the key ``batching`` is ignored."""
        return replace(super().training(net, now), batching="random-replay")

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Score the chunk's classes with the local model; keep the samples of each class that it is most certain of."""
        net = training.net
        candidates = now.state.buffer.followed_by(now.chunk)
        unknown = torch.full((len(candidates),), torch.nan, dtype=torch.float64)
        known = now.state.extra.get("information", unknown[:0])
        rated = now.state.extra.get("information.samples")  # earlier versions stored none
        if len(known) == len(now.state.buffer) and (rated is None or torch.equal(rated, identities(now.state.buffer))):
            unknown[: len(known)] = known  # else the buffer has samples of an earlier run
        information = unknown
        due = now.current[candidates.labels] | information.isnan()
        information[due] = self._information(net, candidates.take(due.nonzero().squeeze(1)), now)
        capacity, generator = self.config.buffer.capacity, self.generator("ofcl-places", now.number)
        kept = most_certain(information, candidates.labels, capacity, generator)
        buffer = candidates.take(kept)
        return Kept(buffer, {"information": information[kept], "information.samples": identities(buffer)})

    def _information(self, net: Network, samples: Samples, now: ClientRound) -> Tensor:
        """Bregman information, float64 (n,)."""
        numbers = draw(len(samples), self.generator("ofcl-views", now.number))
        images = self.resident(samples)
        views = VIEWS if self.experiment.dataset.form.is_picture else ARRAY_VIEWS
        logits = [self._logits_of(view, net, images, numbers) for view in views.values()]
        return bregman_information(torch.stack(logits), now.seen)

    def _logits_of(self, view: View, net: Network, images: Callable[[Tensor], Tensor], numbers: Tensor) -> Tensor:
        """Logits of one view of each sample, float32 (n, C) on the experiment's device."""
        device, preprocess = self.experiment.device, self.experiment.preprocess
        if not self.experiment.dataset.form.is_picture:  # of normalised values

            def changed(rows: Tensor) -> Tensor:
                return view(preprocess(images(rows)), numbers[rows].to(device))

            return predict(net, changed, torch.arange(len(numbers)), Preprocess.identity(device), home=False)

        def seen_by(rows: Tensor) -> Tensor:
            pixels = images(rows).to(device, torch.float32) / 255
            return view(pixels, numbers[rows].to(device)) * 255

        return predict(net, seen_by, torch.arange(len(numbers)), preprocess, home=False)


METHOD = Method(OfclClient, "OFCL", is_mean=True, samples=samples)
