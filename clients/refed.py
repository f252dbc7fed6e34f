"""The client of Re-Fed: replay of the samples that are hardest for a personalised informative model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from flwr.app import RecordDict
from torch import Tensor

from clients.base import ClientRound, ClientRule, Kept, Metrics, Stopwatch, Training
from fedkace_flwr.algorithms.refed_scores import Informative, most_informative, network_scores
from fedkace_flwr.keys import key
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.snapshots import copied, restored, snapshot


@dataclass(frozen=True)
class RefedKeys:
    """Re-Fed."""

    refed_lambda: float = key(
        0.5,
        "Inferred: how strongly the informative model is personalised; 1 ignores the global model.",
        above=0,
        high=1,
    )
    refed_steps: int = key(5, "Inferred: number of training steps of the informative model, s.", unit="steps", low=1)
    refed_learning_rate: float = key(0.01, "Inferred: step size of the informative model.", above=0)
    refed_reduction: Literal["mean", "sum"] = key(
        "mean", "Inferred: train the informative model on the mean or on the sum of the gradients."
    )
    refed_gradient: Literal["full", "last-layer"] = key(
        "full",
        "Inferred: take gradient norms over all parameters (`full`), or over the last layer only (`last-layer`).",
    )
    refed_power: int = key(1, "Inferred: use gradient norms as they are (1) or squared (2).", low=1, high=2)
    refed_start: Literal["global", "local", "persistent"] = key(
        "global",
        "Inferred: the informative model starts from the global model that it is pulled towards (`global`), from the round's local model (`local`), or from where it ended the last time (`persistent`).",
    )
    refed_anchor: Literal["current", "previous"] = key(
        "current",
        "Inferred: score with the round's new global model once it arrives (`current`), or right after local training with the global model from the start of the round (`previous`).",
    )

    @property
    def scoring(self) -> dict[str, Any]:
        """Arguments of :func:`fedkace_flwr.algorithms.refed_scores.network_scores`."""
        return {
            "last_layer": self.refed_gradient == "last-layer",
            "steps": self.refed_steps,
            "learning_rate": self.refed_learning_rate,
            "locality": self.refed_lambda,
            "reduction": self.refed_reduction,
            "power": self.refed_power,
        }


class RefedClient(ClientRule):
    """Re-Fed (Li et al., "Towards Efficient Replay in Federated Incremental Learning", CVPR 2024).

    Plain cross-entropy over all classes seen, on chunk and buffer alike; the M samples of both with the largest
    accumulated gradient norm make up the next buffer (:mod:`fedkace_flwr.algorithms.refed_scores`). Classes are not
    balanced: a class may fill the buffer or disappear from it.

    We found no code published by its authors. Inferred, and configurable: lambda, s and eta (``refed-lambda``,
    ``refed-steps``, ``refed-learning-rate``), the mean of the gradients instead of their sum, with which full-batch
    steps diverge (``refed-reduction``), whose gradient (``refed-gradient``), and norms as they are or squared
    (``refed-power``). Also:

    - Re-Fed scores the last task's samples when the next task arrives. Here a chunk is gone by then, so the scores
      are taken at the end of its round, from the new global model: the same model and the same samples. With
      ``refed-anchor = previous`` they are taken right after local training, with the global model from the start
      of the round: an older anchor, but no second message to wait for.
    - The informative model starts as a copy of the global model, as a copy of the trained local model, or as it was
      when it was last used, the first time as the global model (``refed-start``). The latter two are stored in the
      client's state.

    Inferred, without a key:

    - Batch normalisation uses the running statistics of the model that the informative one started as.
    - While all samples fit they are all kept, and no informative model is trained; of equal scores the earlier
      sample stays.
    - A client that does not receive the round's global model cannot score with it and keeps its old buffer.
    """

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Keep all samples while they fit; then choose by the model that was sent, or wait for the new global one."""
        pool, settings = now.state.buffer.followed_by(now.chunk), self.config.of(RefedKeys)
        if len(pool) <= self.config.buffer.capacity:
            return Kept(pool)
        if settings.refed_anchor == "previous":
            sent = copied(training.net, {name: torch.from_numpy(array) for name, array in now.sent.items()})
            self.predictor.recalibrate(sent, pool, now.number)
            return self._highest(pool, now.seen, sent, training.net, now.state.extra)
        if settings.refed_start == "local":
            return Kept(now.state.buffer, snapshot("local", training.net.state_dict()))
        return Kept(now.state.buffer)

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Score chunk and buffer with the global model and keep the highest, unless the buffer is chosen already."""
        state, report = super().receive(net, state, round_number, content)
        joined = bool((state.buffer.rounds == round_number).any())
        if self.config.of(RefedKeys).refed_anchor == "previous" or state.round != round_number or joined:
            return state, report
        watch = Stopwatch()
        with watch(keys.SELECTION_SECONDS):
            pool = state.buffer.followed_by(self.source.chunk(round_number, state.round))
            local = restored("local", state.extra, net)
            kept = self._highest(pool, state.seen, net, local, state.extra)
        report |= watch.seconds | {keys.BUFFER_SIZE: len(kept.buffer)} | self.class_histogram(kept.buffer)
        return replace(state, buffer=kept.buffer, extra={**state.extra, **kept.extra}), report

    def _highest(
        self, pool: Samples, seen: Tensor, anchor: Network, local: Network | None, extra: Mapping[str, Tensor]
    ) -> Kept:
        """The M highest of the pool, and the informative model if it is to be stored."""
        rule = self.config.of(RefedKeys).refed_start
        start = {"local": local, "persistent": restored("informative", extra, anchor)}.get(rule) or anchor
        found = self._scores(start, pool, seen, anchor)
        buffer = pool.take(most_informative(found.scores, self.config.buffer.capacity))
        if rule != "persistent":
            return Kept(buffer)
        return Kept(buffer, snapshot("informative", {**start.state_dict(), **found.parameters}))

    def _scores(self, net: Network, pool: Samples, seen: Tensor, anchor: Network) -> Informative:
        """Scores by an informative model that starts as ``net``."""
        device, images = self.experiment.device, self.resident(pool)

        def blocks(size: int) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in torch.split(torch.arange(len(pool)), size):
                yield self.experiment.preprocess(images(rows)), pool.labels[rows].to(device)

        side = self.experiment.dataset.image_size
        return network_scores(net, blocks, seen.to(device), anchor, size=side, **self.config.of(RefedKeys).scoring)


METHOD = Method(RefedClient, "Re-Fed", keys=(RefedKeys,), is_mean=True)
