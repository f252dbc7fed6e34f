"""Server of FedCBDR: one SVD of all clients' masked features, and the draw of samples (Qi et al., NeurIPS 2025)."""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedkace_flwr.algorithms import fedcbdr_leverage as cbdr
from fedkace_flwr.clients import fedcbdr as names
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.validation import check_labels, check_within
from fedkace_flwr.messaging.wire import NumpyArray, Shapes, Weights
from fedkace_flwr.rounds.server_round import ServerRound
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.strategies.base import ServerRule

_SLACK = 1e-6  # rounding may carry a leverage of 1 slightly above 1


class FedCbdr(ServerRule):
    """Plain mean; then features, scores and a selection for each client with more candidates than its buffer holds.

    If a client's reply fails, the client keeps its own random choice, and the others' scores are computed without it.

    Inferred, in addition to the list of :class:`fedkace_flwr.clients.fedcbdr.FedCbdrClient`: the paper stacks the rows of all
    clients, its published code does not; U keeps only the columns of nonzero singular values; the server draws M
    samples for each client; the samples drawn are not rescaled by 1/sqrt(n p).
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._kept: dict[int, ArrayRecord] = {}

    def begin_round(self, now: ServerRound, arrays: ArrayRecord) -> None:
        """Forget the last round's selection."""
        self._kept = {}

    def between(self, now: ServerRound, arrays: ArrayRecord) -> ArrayRecord:
        """Collect masked features, return rows of U, collect scores, and draw what each client keeps."""
        pools = self._pools(now)
        if not pools:
            return arrays
        width, double, whole = now.shapes["output.weight"][0][1], np.dtype(np.float64), np.dtype(np.int64)
        models = {client: RecordDict({wire.ARRAYS: self.model_for(client, arrays)}) for client in pools}

        def features(client: int, content: RecordDict) -> Weights:
            return wire.read_arrays(content, {names.FEATURES: ((pools[client], width), double)})

        answers = now.ask(names.FEATURES_QUERY, names.FEATURES_QUERY, models, features)
        masked = {client: answer[names.FEATURES] for client, answer in answers.items()}
        # A client with far larger features would dominate the common SVD. Norms can be compared, because all features
        # come from the same model and rotations preserve norms.
        for client in now.far_larger(names.FEATURES_QUERY, "features", masked):
            del masked[client]
        if not masked:
            return arrays

        rows = _rows_of_u(masked)
        factors = {k: RecordDict({wire.ARRAYS: wire.array_record({names.ROWS: part})}) for k, part in rows.items()}

        def selection(client: int, content: RecordDict) -> ArrayRecord:
            shapes: Shapes = {names.SCORES: ((pools[client],), double), names.LABELS: ((pools[client],), whole)}
            return self._draw(now, client, wire.read_arrays(content, shapes))

        self._kept = now.ask(names.SCORES_QUERY, names.SCORES_QUERY, factors, selection)
        return arrays

    def extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """Positions of the samples that the client is to keep, if they were drawn."""
        return {names.SELECTION: self._kept[client]} if client in self._kept else {}

    def evaluated(self, now: ServerRound) -> dict[str, float]:
        """Record the clients that did not apply their selection."""
        for client, metrics in now.report.evaluated.items():
            if client in self._kept and not metrics.get(names.SELECTED):
                now.fail(client, names.SELECTION, "it did not take the selection and keeps a random choice")
        return {}

    def _pools(self, now: ServerRound) -> dict[int, int]:
        """Number of candidates of each client that has more than its buffer holds."""
        capacity, pools = self.config.buffer.capacity, {}
        largest = capacity + now.limits.examples
        for client, metrics in now.report.trained.items():
            size = metrics.get(names.POOL_SIZE)
            if not isinstance(size, int) or not 0 < size <= largest:
                reason = f"{names.POOL_SIZE} = {wire.shown(size)}: must be between 1 and {largest}"
                now.fail(client, names.FEATURES_QUERY, reason)
            elif size > capacity:
                pools[client] = size
        return pools

    def _draw(self, now: ServerRound, client: int, answer: Weights) -> ArrayRecord:
        """Draw the positions of the samples that a client keeps.

        Raises
        ------
        MessageError
            A score or a label is impossible.
        """
        scores, labels = answer[names.SCORES], answer[names.LABELS]
        check_within(names.SCORES, scores, 0, 1, slack=_SLACK)
        check_labels(labels, now.classes)
        draws = generator_for(self.config.run.seed, "fedcbdr-draw", client, now.number)
        kept = cbdr.draw(torch.from_numpy(scores), torch.from_numpy(labels), self.config.buffer.capacity, draws)
        return wire.array_record({names.POSITIONS: kept.numpy()})


def _rows_of_u(masked: Mapping[int, NumpyArray]) -> dict[int, NumpyArray]:
    """Each client's rows of the left factor of all features, stacked by client number."""
    order = sorted(masked)
    blocks = [torch.from_numpy(masked[client]) for client in order]
    parts = torch.split(cbdr.left_factor(torch.cat(blocks)), [len(block) for block in blocks])
    return {client: np.ascontiguousarray(part.numpy()) for client, part in zip(order, parts, strict=True)}
