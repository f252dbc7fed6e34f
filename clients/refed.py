"""The client of Re-Fed: replay of the samples that are hardest for a personalised informative model."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.algorithms.refed_scores import most_informative, network_scores
from fedkace_flwr.clients.base import ClientRound, ClientRule, Kept, Metrics, Stopwatch, Training
from fedkace_flwr.messaging import wire
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState

STEPS, LEARNING_RATE, LAMBDA = 5, 0.01, 0.5
"""Inferred: number s and size eta of the informative model's steps, and how strongly it is personalised, half-way between
the global model alone and none of it. No study has varied them."""


class RefedClient(ClientRule):
    """Re-Fed (Li et al., "Towards Efficient Replay in Federated Incremental Learning", CVPR 2024).

    Plain cross-entropy over all classes seen, on chunk and buffer alike; the M samples of both with the largest
    accumulated gradient norm make up the next buffer (:mod:`fedkace_flwr.algorithms.refed_scores`). Classes are not
    balanced: a class may fill the buffer or disappear from it.

    We found no code published by its authors. Inferred:

    - lambda, s and eta (:data:`LAMBDA`, :data:`STEPS`, :data:`LEARNING_RATE`);
    - the mean of the gradients instead of their sum, with which full-batch steps diverge; norms over all parameters,
      and not squared;
    - Re-Fed scores the last task's samples when the next task arrives. Here a chunk is gone by then, so the scores
      are taken at the end of its round, from the new global model: the same model and the same samples;
    - the informative model starts as a copy of that global model;
    - batch normalisation uses the global model's running statistics;
    - while all samples fit they are all kept, and no informative model is trained; of equal scores the earlier
      sample stays;
    - a client that does not receive the round's global model cannot score with it and keeps its old buffer.
    """

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Keep all samples while they fit; then wait for the new global model."""
        pool = now.state.buffer.followed_by(now.chunk)
        return Kept(pool if len(pool) <= self.config.buffer.capacity else now.state.buffer)

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Score chunk and buffer with the global model and keep the highest, unless the buffer is chosen already."""
        state, report = super().receive(net, state, round_number, content)
        joined = bool((state.buffer.rounds == round_number).any())
        if state.round != round_number or joined:
            return state, report
        watch = Stopwatch()
        with watch(wire.SELECTION_SECONDS):
            pool = state.buffer.followed_by(self.source.again(round_number, state.follows))
            scores = self._scores(net, pool, state.seen)
            buffer = pool.take(most_informative(scores, self.config.buffer.capacity))
        report |= watch.seconds | {wire.BUFFER_SIZE: len(buffer)} | self.class_histogram(buffer)
        return replace(state, buffer=buffer), report

    def _scores(self, net: Network, pool: Samples, seen: Tensor) -> Tensor:
        """Scores by an informative model that starts as ``net`` and is pulled towards it."""
        device, images = self.experiment.device, self.resident(pool)

        def blocks(size: int) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in torch.split(torch.arange(len(pool)), size):
                yield self.experiment.preprocess(images(rows)), pool.labels[rows].to(device)

        return network_scores(
            net,
            blocks,
            seen.to(device),
            steps=STEPS,
            learning_rate=LEARNING_RATE,
            locality=LAMBDA,
            shape=self.experiment.dataset.form.shape,
        ).scores


METHOD = Method(RefedClient, "Re-Fed", is_mean=True)
