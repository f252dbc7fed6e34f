"""The client of FedCBDR: temperature-scaled replay, buffer by global leverage (Qi et al., NeurIPS 2025)."""

from dataclasses import replace

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.algorithms import fedcbdr_leverage as cbdr
from fedkace_flwr.algorithms.fedcbdr_loss import TemperatureLoss
from fedkace_flwr.clients.base import Acted, Array, ClientRound, ClientRule, Kept, Metrics, Training
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.metrics import Bound, Metric
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method, Traffic
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.losses import Objective

FEATURES_QUERY, SCORES_QUERY = "query.features", "query.scores"
"""Actions of the exchange: the first collects masked features, the second sends rows of U and collects scores."""

FEATURES, ROWS, SCORES, LABELS, POSITIONS = "features", "rows", "scores", "labels", "positions"
"""Names of the arrays exchanged."""

SELECTION = "selection"
"""Record of the evaluation message that holds the positions of the samples to keep."""

POOL_SIZE, SELECTED = "pool-size", "selected"
"""Names of the metrics."""


TEMPERATURES = {"tau_old": 0.9, "tau_new": 1.1, "weight_old": 1.1, "weight_new": 0.9}
"""The publication's temperatures, and its weights of the replayed and of the new samples' loss."""

METRICS = (
    Metric(
        POOL_SIZE,
        "FedCBDR: number of samples in buffer and chunk together, from which the new buffer is drawn.",
        high=Bound("`capacity` plus the samples of a chunk", lambda limits: limits.capacity + limits.examples),
        low=1,
        whole=True,
        unit="samples",
    ),
    Metric(
        SELECTED,
        "FedCBDR: whether the client's new buffer is the one that the server drew.",
        phase="evaluation",
        whole=True,
    ),
)


_BLOCK = 128


class FedCbdrClient(ClientRule):
    """Trains, sends masked features of the global model, unmasks and scores, and keeps the samples the server draws.

    The paper selects once per task, from disjoint tasks, with one budget for all clients. Inferred for the stream:

    - every round is a task, and the candidates are buffer and chunk together, of which M are kept;
    - new classes are those of the chunk, old ones the other classes seen;
    - logits are scaled once, by class, and old and new samples are averaged separately, as in the paper; the
      published code scales each row again, by the sample's origin, and averages once;
    - the draw is class by class, so the client sends the candidates' labels beside their scores, which the paper's
      messages do not contain. ``report-classes`` does not cover them;
    - the draw is without replacement, since a buffer holds distinct samples; the paper's is with replacement;
    - P is removed from the returned rows, as otherwise they belong to no sample; the published code, which also
      factorises each client's features separately, does not remove it, so its draw is nearly uniform;
    - the global model answers, and logits are scaled during training only (``predict-with``).

    Q is derived from the run's seed, which the server of a simulation knows too. Anyone who holds Q sees the Gram
    matrix of a client's features, but not which row belongs to which sample.
    """

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """Temperature-scaled cross-entropy; the plain one while the buffer is empty."""
        if len(now.state.buffer) == 0:
            return super().objective(net, now)
        device = self.experiment.device
        return TemperatureLoss(now.seen.to(device), now.current.to(device), **TEMPERATURES)

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """All samples while they fit; then a class-balanced random choice, until the server's choice arrives."""
        return Kept(self._drawn(now.state.buffer.followed_by(now.chunk), now.number))

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Also the number of samples to choose from."""
        return super().report(now, training, kept) | {POOL_SIZE: len(now.state.buffer) + len(now.chunk)}

    def act(self, action: str, content: RecordDict, round_number: int) -> Acted:
        """Return masked features by a global model, or scores and labels for rows of U.

        Raises
        ------
        MessageError
            The round was not trained, the rows do not fit, or the action is unknown.
        RunError
            The features are not finite.
        """
        if action not in (FEATURES_QUERY, SCORES_QUERY):
            return super().act(action, content, round_number)
        if self.store.before(round_number + 1).round != round_number:
            raise MessageError(f"client {self.number} has not trained in round {round_number}")
        pool = self._pool(round_number)
        left = cbdr.random_orthogonal(len(pool), self.generator("fedcbdr-p", round_number))

        if action == FEATURES_QUERY:
            sent = wire.read_arrays(content, self.experiment.travelling.sent)
            # In a resumed run the stored buffer may be the server's choice already.
            state = replace(self.store.before(round_number + 1), buffer=self._drawn(pool, round_number))
            net = self.predictor.received(sent, state, round_number)
            features = self._features(net, pool)
            shared = generator_for(self.config.run.seed, "fedcbdr-q", round_number)
            right = cbdr.random_orthogonal(features.shape[1], shared)
            return _acted({FEATURES: cbdr.mask(features, left, right).numpy()})

        width = self.experiment.weight_shapes["output.weight"][0][1]
        rank = wire.declared_length(content.array_records.get(wire.ARRAYS), ROWS, 1, width)
        rows = wire.read_arrays(content, {ROWS: ((len(pool), rank), np.dtype(np.float64))})[ROWS]
        scores = cbdr.leverage(cbdr.unmask(torch.from_numpy(rows), left))
        return _acted({SCORES: scores.numpy(), LABELS: pool.labels.numpy()})

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Take the server's selection as the buffer M_t, and the global model for inference."""
        state, report = super().receive(net, state, round_number, content)
        if state.round != round_number:
            return state, report
        pool = self._pool(round_number)
        if len(pool) <= self.config.buffer.capacity:
            return state, report
        kept = self._kept(content, len(pool))
        if kept is None:
            return state, report | {SELECTED: 0}
        buffer = pool.take(kept)
        return replace(state, buffer=buffer), report | self.class_histogram(buffer) | {SELECTED: 1}

    def _pool(self, round_number: int) -> Samples:
        """M_{t-1} followed by D_t; the same for all messages of the round."""
        before = self.store.before(round_number)
        return before.buffer.followed_by(self.source.chunk(round_number, before.round))

    def _drawn(self, pool: Samples, round_number: int) -> Samples:
        """The buffer until the server's choice arrives; the same for all messages of the round."""
        alike = torch.ones(len(pool), dtype=torch.float64)
        draws = self.generator("fedcbdr-draw", round_number)
        return pool.take(cbdr.draw(alike, pool.labels, self.config.buffer.capacity, draws))

    def _features(self, net: Network, samples: Samples) -> Tensor:
        """Features in evaluation mode, float64 (n, F) on the CPU."""
        net.eval()
        with torch.no_grad():
            blocks = [
                net.features(self.experiment.preprocess(self.images(samples.take(positions))))
                for positions in torch.split(torch.arange(len(samples)), _BLOCK)
            ]
        features = torch.cat(blocks).cpu().double()
        if not bool(features.isfinite().all()):
            rate = self.config.training.learning_rate
            raise RunError(f"the model's features are not finite; try a learning-rate below {rate:g}")
        return features

    def _kept(self, content: RecordDict, size: int) -> Tensor | None:
        """The selected positions, if the message holds them and they fit the pool."""
        record, capacity = content.array_records.get(SELECTION), self.config.buffer.capacity
        if record is None:
            return None
        count = wire.declared_length(record, POSITIONS, 0, size)
        shapes = {POSITIONS: ((count,), np.dtype(np.int64))}
        kept = torch.from_numpy(wire.checked_arrays(record, shapes)[POSITIONS])
        whole = count == capacity and len(set(kept.tolist())) == count
        fits = whole and int(kept.min()) >= 0 and int(kept.max()) < size
        return kept if fits else None


def _acted(arrays: dict[str, Array]) -> Acted:
    return Acted(RecordDict({wire.ARRAYS: wire.array_record(arrays)}))


METHOD = Method(
    FedCbdrClient,
    "FedCBDR",
    server="fedkace_flwr.strategies.fedcbdr:FedCbdr",
    metrics=METRICS,
    actions=(FEATURES_QUERY, SCORES_QUERY),
    sends_labels=True,
    traffic=Traffic(
        "2*(S + c) + (m > M)*((S + c) + (8*m*r + 132 + c) + (8*k + 137))",
        "S + R + (m > M)*((8*m*F + 136) + 2*(8*m + 134))",
    ),
)
