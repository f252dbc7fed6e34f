"""The client of DCFCL: no buffer; distillation from the model it was sent (Yang et al., NeurIPS 2025)."""

import torch
from torch import Tensor

from clients.base import ClientRound, ContinualClient
from fedkace_flwr.methods.dcfcl import DcfclKeys
from fedkace_flwr.training.distillation import soft_cross_entropy
from fedkace_flwr.training.losses import Batch, Objective, TaskLoss
from fedkace_flwr.training.model import ResNet18


class DistillationLoss(TaskLoss):
    """Cross-entropy over all classes met, plus lambda times soft cross-entropy from a teacher over some of them.

    Parameters
    ----------
    seen, distilled : Tensor
        bool (C,): C_<=t, and the classes over which the teacher speaks, at least one.
    teacher : Tensor
        Float (n, C): the teacher's logits of the chunk's samples, in their order. They never change.
    weight : float
        lambda.
    temperature : float
        Softens both sides.
    """

    capturable = False  # the distilled classes are cut out, by which the device has to be waited for

    def __init__(self, seen: Tensor, distilled: Tensor, teacher: Tensor, weight: float, temperature: float) -> None:
        super().__init__(seen, seen)
        self._distilled = distilled
        self._teacher = teacher
        self._weight = weight
        self._temperature = temperature

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch."""
        learned = self._teacher[batch.positions]
        forgotten = soft_cross_entropy(logits, learned, self._distilled, self._temperature)
        return super().loss(logits, features, batch) + self._weight * forgotten


class DcfclClient(ContinualClient):
    """Trains from the model of its coalition, which is also its teacher, and answers by that of its new coalition.

    A round is a task here, so that the past model, the teacher, is the one received after the last aggregation
    and again at the beginning of this round: what the network holds before training.

    Inferred: lambda (``dcfcl-lambda``; the paper varies it and its code has another default); distillation over
    the classes met before alone (``dcfcl-distil-classes``; ``all``: over all outputs, as in the published code,
    which then moves also those of classes not met yet); each client by its own count of classes met before, so that
    one without any, as in round 1, trains by plain cross-entropy.
    """

    def objective(self, net: ResNet18, now: ClientRound) -> Objective:
        """Cross-entropy, with distillation from ``net`` as it was received."""
        settings, device = self.config.of(DcfclKeys), self.experiment.device
        if settings.dcfcl_lambda == 0 or not bool(now.old.any()):
            return super().objective(net, now)
        teacher = self.logits(net, now.chunk).to(device)
        distilled = now.old if settings.dcfcl_distil_classes == "old" else torch.ones_like(now.old)
        masks = now.seen.to(device), distilled.to(device)
        return DistillationLoss(*masks, teacher, settings.dcfcl_lambda, settings.dcfcl_temperature)
