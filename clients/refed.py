"""The client of Re-Fed: replay of the samples that a personalised informative model finds hardest."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from flwr.app import RecordDict
from torch import Tensor

from clients.base import ClientRound, ContinualClient, Metrics, Stopwatch
from fedkace_flwr import messages as keys
from fedkace_flwr.buffer import Samples
from fedkace_flwr.informative import most_informative, network_scores
from fedkace_flwr.model import ResNet18
from fedkace_flwr.store import ClientState


class RefedClient(ContinualClient):
    """Re-Fed (Li et al., "Towards Efficient Replay in Federated Incremental Learning", CVPR 2024).

    Plain cross-entropy over all classes met, on chunk and buffer alike; of both, the M samples of the largest
    accumulated gradient norm make the next buffer (:mod:`fedkace_flwr.informative`). Classes are not balanced:
    a class may fill the buffer or leave it.

    Its authors published no code that we could find. Inferred, and open to configuration: lambda, s and eta
    (``refed-lambda``, ``refed-steps``, ``refed-learning-rate``), the mean in place of the sum of gradients,
    with which full-batch steps diverge (``refed-reduction``), whose gradient (``refed-gradient``) and norms as
    they are or squared (``refed-power``). Inferred, without a key:

    - Re-Fed scores the last task's samples when the next task arrives. Here a chunk is gone by then, so the
      scores are taken at the end of its round, from the new global model: the same model, the same samples.
    - Batch normalisation uses its running statistics while scoring.
    - All samples serve while they fit; of equal scores the sample met first stays.
    - A client that is not sent the round's global model cannot score: it keeps the buffer that it had.
    """

    def maintain(self, net: ResNet18, now: ClientRound) -> Samples:
        """Keep everything while it fits; else wait for the global model."""
        pool = now.state.buffer.followed_by(now.chunk)
        return pool if len(pool) <= self.config.buffer.capacity else now.state.buffer

    def receive(
        self, net: ResNet18, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Score chunk and buffer from the global model, and keep the highest."""
        state, report = super().receive(net, state, round_number, content)
        joined = bool((state.buffer.rounds == round_number).any())
        if state.round != round_number or joined:
            return state, report
        watch = Stopwatch()
        with watch(keys.SELECTION_SECONDS):
            pool = state.buffer.followed_by(self.experiment.chunk(self.number, round_number))
            scores = self._scores(net, pool, state.seen)
            buffer = pool.take(most_informative(scores, self.config.buffer.capacity))
        report = report | watch.seconds | {keys.BUFFER_SIZE: len(buffer)}
        if self.config.run.report_classes:
            report[keys.BUFFER_CLASSES] = buffer.class_counts(self.experiment.num_classes).tolist()
        return replace(state, buffer=buffer), report

    def _scores(self, net: ResNet18, pool: Samples, seen: Tensor) -> Tensor:
        """I of each sample, float64 (n,)."""
        device = self.experiment.device

        def blocks(size: int) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in torch.split(torch.arange(len(pool)), size):
                block = pool.take(rows)
                yield self.experiment.preprocess(block.images(self.experiment.dataset.fetch)), block.labels.to(device)

        return network_scores(net, blocks, seen.to(device), self.config.refed).scores
