"""The client of FLwF: federated averaging that distils from the received model."""

from fedkace_flwr.clients.base import ClientRound, ClientRule
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.training.distillation import DistillationLoss
from fedkace_flwr.training.losses import Objective

LAMBDA, TEMPERATURE = 1.0, 2.0
"""Inferred: weight and temperature of distillation, as in Li and Hoiem's publication. No study has varied them."""


class FlwfClient(ClientRule):
    """Learning without forgetting (Li and Hoiem, ECCV 2016) with the received global model as teacher.

    As in FLwF (Usmanova et al., "A distillation-based approach integrating continual learning and federated learning
    for pervasive services", 2021): cross-entropy on the chunk, plus lambda times distillation of the classes met in
    earlier rounds. Inferred: :data:`LAMBDA` and :data:`TEMPERATURE`; the model of a client's previous task, a second teacher in one variant of FLwF, is left out.
    """

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """Cross-entropy plus distillation from ``net`` as received; in round 1 there is nothing to distil."""
        device = self.experiment.device
        if not bool(now.old.any()):
            return super().objective(net, now)
        teacher = self.teacher_logits(net, now).to(device)
        masks = now.seen.to(device), now.old.to(device)
        return DistillationLoss(*masks, teacher, LAMBDA, TEMPERATURE)


METHOD = Method(FlwfClient, "FLwF", is_mean=True, replays=False)
