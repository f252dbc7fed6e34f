"""The client of Re-Fed: replay of the samples that a personalised informative model finds hardest."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from flwr.app import RecordDict
from torch import Tensor

from clients.base import ClientRound, ContinualClient, Metrics, Stopwatch
from fedkace_flwr.algorithms.refed_scores import Informative, most_informative, network_scores
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods.refed import RefedKeys
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_store import ClientState
from fedkace_flwr.training.model import ResNet18
from fedkace_flwr.training.snapshots import restored, snapshot


class RefedClient(ContinualClient):
    """Re-Fed (Li et al., "Towards Efficient Replay in Federated Incremental Learning", CVPR 2024).

    Plain cross-entropy over all classes met, on chunk and buffer alike; of both, the M samples of the largest
    accumulated gradient norm make the next buffer (:mod:`fedkace_flwr.algorithms.refed_scores`). Classes are not balanced:
    a class may fill the buffer or leave it.

    Its authors published no code that we could find. Inferred, and open to configuration: lambda, s and eta
    (``refed-lambda``, ``refed-steps``, ``refed-learning-rate``), the mean in place of the sum of gradients,
    with which full-batch steps diverge (``refed-reduction``), whose gradient (``refed-gradient``) and norms as
    they are or squared (``refed-power``). Also:

    - Re-Fed scores the last task's samples when the next task arrives. Here a chunk is gone by then, so the
      scores are taken at the end of its round, from the new global model: the same model, the same samples. With
      ``refed-anchor = previous`` they are taken right after local training, and the global model is the one that
      the round began with: an older anchor, but no wait for a second message.
    - The informative model starts as a copy of the global model, of the local model after its training, or as it
      ended when it was last needed, the first time as the global model (``refed-start``). The two latter are
      stored with the client's state.

    Inferred, without a key:

    - Batch normalisation uses the running statistics of the model that the informative one started as.
    - All samples serve while they fit, and no informative model moves; of equal scores the sample met first stays.
    - A client that is not sent the round's global model cannot score by it: it keeps the buffer that it had.
    """

    def begin(self, net: ResNet18, now: ClientRound) -> None:
        """Keep the model that was sent, where it is the anchor."""
        if self.config.of(RefedKeys).refed_anchor == "previous":
            self._sent = copy.deepcopy(net)

    def maintain(self, net: ResNet18, now: ClientRound) -> Samples:
        """Keep everything while it fits; else choose by the model that was sent, or wait for the new global one."""
        pool, settings = now.state.buffer.followed_by(now.chunk), self.config.of(RefedKeys)
        if len(pool) <= self.config.buffer.capacity:
            return pool
        if settings.refed_anchor == "previous":
            buffer, self.extra = self._highest(pool, now.seen, self._sent, net, now.state.extra)
            return buffer
        if settings.refed_start == "local":
            self.extra = snapshot("local", net.state_dict())
        return now.state.buffer

    def receive(
        self, net: ResNet18, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Score chunk and buffer by the global model, and keep the highest, unless they are chosen already."""
        state, report = super().receive(net, state, round_number, content)
        joined = bool((state.buffer.rounds == round_number).any())
        if self.config.of(RefedKeys).refed_anchor == "previous" or state.round != round_number or joined:
            return state, report
        watch = Stopwatch()
        with watch(keys.SELECTION_SECONDS):
            pool = state.buffer.followed_by(self.source.chunk(round_number, state.round))
            local = restored("local", state.extra, net)
            buffer, kept = self._highest(pool, state.seen, net, local, state.extra)
        report = report | watch.seconds | {keys.BUFFER_SIZE: len(buffer)}
        if self.config.run.report_classes:
            report[keys.BUFFER_CLASSES] = buffer.class_counts(self.experiment.num_classes).tolist()
        return replace(state, buffer=buffer, extra={**state.extra, **kept}), report

    def _highest(
        self, pool: Samples, seen: Tensor, anchor: ResNet18, local: ResNet18 | None, extra: Mapping[str, Tensor]
    ) -> tuple[Samples, dict[str, Tensor]]:
        """The M highest of the pool, and what has to be stored of the informative model."""
        rule = self.config.of(RefedKeys).refed_start
        start = {"local": local, "persistent": restored("informative", extra, anchor)}.get(rule) or anchor
        found = self._scores(start, pool, seen, anchor)
        buffer = pool.take(most_informative(found.scores, self.config.buffer.capacity))
        if rule != "persistent":
            return buffer, {}
        return buffer, snapshot("informative", {**start.state_dict(), **found.parameters})

    def _scores(self, net: ResNet18, pool: Samples, seen: Tensor, anchor: ResNet18) -> Informative:
        """What the informative model, starting at ``net``, leaves behind."""
        device = self.experiment.device

        def blocks(size: int) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in torch.split(torch.arange(len(pool)), size):
                block = pool.take(rows)
                yield self.experiment.preprocess(block.images(self.experiment.dataset.fetch)), block.labels.to(device)

        return network_scores(net, blocks, seen.to(device), self.config.of(RefedKeys), anchor)
