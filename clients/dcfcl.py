"""The client of DCFCL: no buffer; distillation from the model it was sent (Yang et al., NeurIPS 2025)."""

from fedkace_flwr.clients.base import ClientRound, ClientRule
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.training.distillation import DistillationLoss
from fedkace_flwr.training.losses import Objective

EPSILON, TEMPERATURE = 0.2, 2.0
"""The publication's weight of model similarity beside update similarity, and its temperature of distillation."""

LAMBDA = 0.2
"""Inferred: weight of distillation. The publication varies it, and its code has another default; no study here has."""


class DcfclClient(ClientRule):
    """Trains from its coalition's model, which is also its teacher, and answers with its new coalition's model.

    A round is a task here, so the past model, the teacher, is the one that the client received after the last
    aggregation and again at the start of this round: the network before training.

    Inferred: lambda (:data:`LAMBDA`); distillation over
    the classes seen in earlier rounds only (the published code distils over all outputs, which also moves those of
    classes not seen yet); each client by its own earlier classes, so that a client
    without any, as in round 1, trains with plain cross-entropy.
    """

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """Cross-entropy plus distillation from ``net`` as received."""
        device = self.experiment.device
        if not bool(now.old.any()):
            return super().objective(net, now)
        teacher = self.teacher_logits(net, now).to(device)
        return DistillationLoss(now.seen.to(device), now.old.to(device), teacher, LAMBDA, TEMPERATURE)


METHOD = Method(DcfclClient, "DCFCL", server="fedkace_flwr.strategies.dcfcl:Dcfcl", replays=False)
