"""The server of FedCBDR: one SVD of all clients' masked features, and the draw (Qi et al., NeurIPS 2025)."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.algorithms import fedcbdr_leverage as cbdr
from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging import validation as plausibility
from fedkace_flwr.messaging.records import Shapes, Weights
from fedkace_flwr.methods import fedcbdr as names
from fedkace_flwr.methods.fedcbdr import FedcbdrKeys
from fedkace_flwr.seeding import generator_for
from strategies.base import ContinualStrategy

_SLACK = 1e-6  # rounding may carry a leverage of 1 a little beyond it


class FedCbdr(ContinualStrategy):
    """Plain mean; then features, scores and a selection, for each client with more samples than places.

    A client whose answer fails keeps its own random choice, and the others' scores do without it.

    Inferred, beside what :class:`clients.fedcbdr.FedCbdrClient` lists: the paper stacks all clients' rows, its
    published code does not (``fedcbdr-scores``); U keeps the columns of nonzero singular values alone; the draw is the
    server's, each client's for its own M places; no 1/sqrt(n p) rescales what was drawn (``fedcbdr-balanced``
    chooses whether classes count).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[int, ArrayRecord] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The global model to every client; no selection stands until this round has drawn it."""
        self._kept = {}
        return super().configure_train(server_round, arrays, config, grid)

    def between(self, number: int, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Masked features in, rows of U out, scores in: draw what each client keeps."""
        width, double, whole = self._shapes["output.weight"][0][1], np.dtype(np.float64), np.dtype(np.int64)
        pools = self._pools()

        questions = {client: RecordDict({keys.ARRAYS: self.model_for(client, arrays)}) for client in pools}
        wanted: dict[int, Shapes] = {
            client: {names.FEATURES: ((size, width), double)} for client, size in pools.items()
        }
        masked = self._ask_arrays(grid, names.FEATURES_QUERY, number, questions, wanted)
        masked = self._of_usual_size(masked)

        questions = {
            client: RecordDict({keys.ARRAYS: keys.array_record({names.ROWS: rows})})
            for client, rows in _rows_of_u(masked, joint=self.config.of(FedcbdrKeys).fedcbdr_scores == "joint").items()
        }
        wanted = {client: {names.SCORES: ((size,), double)} for client, size in pools.items()}
        if self.config.of(FedcbdrKeys).fedcbdr_balanced:
            wanted = {client: {**wanted[client], names.LABELS: ((size,), whole)} for client, size in pools.items()}
        scored = self._ask_arrays(grid, names.SCORES_QUERY, number, questions, wanted)

        for client, answer in scored.items():
            try:
                self._kept[client] = self._draw(client, number, answer)
            except MessageError as error:
                self._fail(client, names.SCORES_QUERY, str(error), error.kind)
        return arrays

    def extras_for(self, client: int) -> dict[str, ArrayRecord | ConfigRecord]:
        """The positions that the client keeps, if they were drawn."""
        return {names.SELECTION: self._kept[client]} if client in self._kept else {}

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean accuracy, and who did not take the selection."""
        metrics = super().aggregate_evaluate(server_round, replies)
        for client, reported in self._report.evaluated.items():
            if client in self._kept and not reported.get(names.SELECTED):
                self._fail(client, names.SELECTION, "it did not take the selection and keeps a random choice")
        return metrics

    def _pools(self) -> dict[int, int]:
        """Samples that each client chooses from, for those with more than fit its buffer."""
        capacity, pools = self.config.buffer.capacity, {}
        largest = capacity + self.vetting.limits.examples
        for client, reported in self._report.trained.items():
            size = reported.get(names.POOL_SIZE)
            if not isinstance(size, int) or not 0 < size <= largest:
                self._fail(
                    client,
                    names.FEATURES_QUERY,
                    f"{names.POOL_SIZE} = {keys.shown(size)}: must be between 1 and {largest}",
                )
            elif size > capacity:
                pools[client] = size
        return pools

    def _ask_arrays(
        self, grid: Grid, action: str, number: int, questions: Mapping[int, RecordDict], wanted: Mapping[int, Shapes]
    ) -> dict[int, Weights]:
        """Ask, and keep the answers whose arrays have the wanted names, shapes and types and are finite."""
        valid = {}
        for client, content in (self.ask(grid, action, action, number, questions) if questions else {}).items():
            try:
                keys.check_size(content, wanted[client])
                valid[client] = keys.checked_arrays(content.array_records[keys.ARRAYS], wanted[client])
            except KeyError:
                self._fail(client, action, f"the reply holds no record {keys.ARRAYS!r}", "records")
            except MessageError as error:
                self._fail(client, action, str(error), error.kind)
        return valid

    def _of_usual_size(self, masked: Mapping[int, Weights]) -> dict[int, Weights]:
        """The features that are not far larger than the others': in one SVD, they would be all that counts.

        One model made them all, and a rotation changes no length.
        """
        if self.config.run.norm_bound == 0:
            return dict(masked)
        lengths = {
            client: {"features": plausibility.root_mean_square(answer[names.FEATURES])}
            for client, answer in masked.items()
        }
        far = self.far_out(names.FEATURES_QUERY, dict.fromkeys(masked, 1), lengths)
        return {client: answer for client, answer in masked.items() if client not in far}

    def _draw(self, client: int, number: int, answer: Weights) -> ArrayRecord:
        scores = torch.from_numpy(answer[names.SCORES])
        labels = torch.from_numpy(answer[names.LABELS]) if names.LABELS in answer else torch.zeros(len(scores)).long()
        classes = self._shapes["output.weight"][0][0]
        if float(scores.min()) < 0 or float(scores.max()) > 1 + _SLACK:
            raise MessageError(
                f"{names.SCORES} reach from {scores.min():g} to {scores.max():g}: must be within 0 and 1"
            )
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise MessageError(
                f"{names.LABELS} reach from {labels.min()} to {labels.max()}: there are {classes} classes"
            )
        draws = generator_for(self.config.run.seed, "fedcbdr-draw", client, number)
        again = self.config.of(FedcbdrKeys).fedcbdr_replacement
        kept = cbdr.draw(scores, labels, self.config.buffer.capacity, draws, replacement=again)
        return keys.array_record({names.POSITIONS: kept.numpy()})


def _rows_of_u(masked: Mapping[int, Weights], *, joint: bool) -> dict[int, keys.NumpyArray]:
    """Each client's rows of a left factor: ``joint`` of all features, stacked by client number, else of its own."""
    if not masked:
        return {}
    order, rows = sorted(masked), dict[int, keys.NumpyArray]()
    for group in [order] if joint else [[client] for client in order]:
        blocks = [torch.from_numpy(masked[client][names.FEATURES]) for client in group]
        parts = torch.split(cbdr.left_factor(torch.cat(blocks)), [len(block) for block in blocks])
        rows |= {client: np.ascontiguousarray(part.numpy()) for client, part in zip(group, parts, strict=True)}
    return rows
