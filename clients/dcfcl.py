"""The client of DCFCL: no buffer; distillation from the model it was sent (Yang et al., NeurIPS 2025)."""

import torch

from clients.base import ClientRound, ClientRule
from fedkace_flwr.methods.dcfcl import DcfclKeys
from fedkace_flwr.networks.network import Network
from fedkace_flwr.training.distillation import DistillationLoss
from fedkace_flwr.training.losses import Objective


class DcfclClient(ClientRule):
    """Trains from its coalition's model, which is also its teacher, and answers with its new coalition's model.

    A round is a task here, so the past model, the teacher, is the one that the client received after the last
    aggregation and again at the start of this round: the network before training.

    Inferred: lambda (``dcfcl-lambda``; the paper varies it, and its code has another default); distillation over
    the classes seen in earlier rounds only (``dcfcl-distil-classes``; ``all``: over all outputs, as in the published
    code, which also moves those of classes not seen yet); each client by its own earlier classes, so that a client
    without any, as in round 1, trains with plain cross-entropy.
    """

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """Cross-entropy plus distillation from ``net`` as received."""
        settings, device = self.config.of(DcfclKeys), self.experiment.device
        if settings.dcfcl_lambda == 0 or not bool(now.old.any()):
            return super().objective(net, now)
        teacher = self.teacher_logits(net, now).to(device)
        distilled = now.old if settings.dcfcl_distil_classes == "old" else torch.ones_like(now.old)
        masks = now.seen.to(device), distilled.to(device)
        return DistillationLoss(*masks, teacher, settings.dcfcl_lambda, settings.dcfcl_temperature)
