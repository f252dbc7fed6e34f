"""The client of FedCBDR: temperature-scaled replay, buffer by global leverage (Qi et al., NeurIPS 2025)."""

from dataclasses import replace

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from clients.base import Acted, Array, ClientRound, ClientRule, Kept, Metrics, Training
from fedkace_flwr.algorithms import fedcbdr_leverage as cbdr
from fedkace_flwr.algorithms.fedcbdr_loss import TemperatureLoss, TwiceScaledLoss
from fedkace_flwr.errors import MessageError, RunError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import fedcbdr as names
from fedkace_flwr.methods.fedcbdr import FedcbdrKeys
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.losses import Objective

_BLOCK = 128


class FedCbdrClient(ClientRule):
    """Trains, sends masked features of the global model, unmasks and scores, and keeps the samples the server draws.

    The paper selects once per task, from disjoint tasks, with one budget for all clients. Inferred for the stream:

    - every round is a task, and the candidates are buffer and chunk together, of which M are kept;
    - new classes are those of the chunk, old ones the other classes seen (``fedcbdr-new-columns``);
    - logits are scaled once, by class, and old and new samples are averaged separately, as in the paper; the
      published code scales each row again, by the sample's origin, and averages once (``fedcbdr-temperatures``);
    - the draw is class by class (``fedcbdr-balanced``), so the client sends the candidates' labels beside their
      scores, which the paper's messages do not contain. ``report-classes`` does not cover them; with
      ``fedcbdr-balanced = false`` no labels leave the client;
    - the draw is without replacement; the paper's is with replacement (``fedcbdr-replacement``). A buffer holds
      distinct samples, so a sample drawn twice is kept once and a place stays empty;
    - P is removed from the returned rows, as otherwise they belong to no sample; the published code, which also
      factorises each client's features separately, does not remove it, so its draw is nearly uniform
      (``fedcbdr-scores``);
    - the global model answers, and logits are scaled during training only (``inference``).

    Q is derived from the run's seed, which the server of a simulation knows too. Anyone who holds Q sees the Gram
    matrix of a client's features, but not which row belongs to which sample.
    """

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """Temperature-scaled cross-entropy; the plain one while the buffer is empty."""
        if len(now.state.buffer) == 0:
            return super().objective(net, now)
        settings, device = self.config.of(FedcbdrKeys), self.experiment.device
        new = now.current if settings.fedcbdr_new_columns == "chunk" else now.current & ~now.old
        loss = TemperatureLoss if settings.fedcbdr_temperatures == "paper" else TwiceScaledLoss
        return loss(
            now.seen.to(device),
            new.to(device),
            tau_old=settings.fedcbdr_tau_old,
            tau_new=settings.fedcbdr_tau_new,
            weight_old=settings.fedcbdr_weight_old,
            weight_new=settings.fedcbdr_weight_new,
        )

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """All samples while they fit; then a class-balanced random choice, until the server's choice arrives."""
        return Kept(self._drawn(now.state.buffer.followed_by(now.chunk), now.number))

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Also the number of samples to choose from."""
        return super().report(now, training, kept) | {names.POOL_SIZE: len(now.state.buffer) + len(now.chunk)}

    def act(self, action: str, content: RecordDict, round_number: int) -> Acted:
        """Return masked features by a global model, or scores and labels for rows of U.

        Raises
        ------
        MessageError
            The round was not trained, the rows do not fit, or the action is unknown.
        RunError
            The features are not finite.
        """
        if action not in (names.FEATURES_QUERY, names.SCORES_QUERY):
            return super().act(action, content, round_number)
        if self.store.before(round_number + 1).round != round_number:
            raise MessageError(f"client {self.number} has not trained in round {round_number}")
        pool = self._pool(round_number)
        left = cbdr.random_orthogonal(len(pool), self.generator("fedcbdr-p", round_number))

        if action == names.FEATURES_QUERY:
            sent = keys.read_arrays(content, self.experiment.weight_shapes)
            # In a resumed run the stored buffer may be the server's choice already.
            state = replace(self.store.before(round_number + 1), buffer=self._drawn(pool, round_number))
            net = self.received(sent, state, round_number)
            features = self._features(net, pool)
            shared = generator_for(self.config.run.seed, "fedcbdr-q", round_number)
            right = cbdr.random_orthogonal(features.shape[1], shared)
            return _acted({names.FEATURES: cbdr.mask(features, left, right).numpy()})

        width = self.experiment.weight_shapes["output.weight"][0][1]
        rank = keys.declared_length(content.array_records.get(keys.ARRAYS), names.ROWS, 1, width)
        shapes = {names.ROWS: ((len(pool), rank), np.dtype(np.float64))}
        rows = torch.from_numpy(keys.read_arrays(content, shapes)[names.ROWS])
        own = cbdr.unmask(rows, left) if self.config.of(FedcbdrKeys).fedcbdr_scores == "joint" else rows
        answer = {names.SCORES: cbdr.leverage(own).numpy()}
        if self.config.of(FedcbdrKeys).fedcbdr_balanced:
            answer[names.LABELS] = pool.labels.numpy()
        return _acted(answer)

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
            return state, report | {names.SELECTED: 0}
        buffer = pool.take(kept)
        if self.config.of(FedcbdrKeys).fedcbdr_replacement:
            report[keys.BUFFER_SIZE] = len(buffer)
        return replace(state, buffer=buffer), report | self.class_histogram(buffer) | {names.SELECTED: 1}

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
        record, capacity = content.array_records.get(names.SELECTION), self.config.buffer.capacity
        if record is None:
            return None
        count = keys.declared_length(record, names.POSITIONS, 0, size)
        shapes = {names.POSITIONS: ((count,), np.dtype(np.int64))}
        kept = torch.from_numpy(keys.checked_arrays(record, shapes)[names.POSITIONS])
        fewest = 1 if self.config.of(FedcbdrKeys).fedcbdr_replacement else capacity
        whole = fewest <= count <= capacity and len(set(kept.tolist())) == count
        fits = whole and int(kept.min()) >= 0 and int(kept.max()) < size
        return kept if fits else None


def _acted(arrays: dict[str, Array]) -> Acted:
    return Acted(RecordDict({keys.ARRAYS: keys.array_record(arrays)}))
