"""The client of DCFCL: no buffer; distillation from the model it was sent (Yang et al., NeurIPS 2025)."""

from dataclasses import dataclass
from typing import Literal

import torch

from clients.base import ClientRound, ClientRule, chunk_alone
from fedkace_flwr.algorithms.dcfcl_coalitions import LARGEST_EXACT
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.training.distillation import DistillationLoss
from fedkace_flwr.training.losses import Objective


@dataclass(frozen=True)
class DcfclKeys:
    """DCFCL."""

    dcfcl_epsilon: float = key(0.2, "Weight of model similarity relative to update similarity.", low=0)
    dcfcl_lambda: float = key(0.2, "Inferred: weight of distillation from the previous round's model.", low=0)
    dcfcl_temperature: float = key(2.0, "Temperature of distillation.", above=0)
    dcfcl_batch_norm: Literal["mean", "local"] = key(
        "mean",
        "Inferred: average batch-norm statistics within a coalition (`mean`), or let each client keep its own (`local`).",
    )
    dcfcl_distil_classes: Literal["old", "all"] = key(
        "old",
        "Inferred: distil over the classes seen before this round (`old`), or over all outputs, as the published code does (`all`).",
    )
    dcfcl_candidates: Literal["auto", "all", "merges"] = key(
        "auto",
        f"Inferred: coalitions to consider. `all`: every subset, for at most {LARGEST_EXACT} clients. `merges`: singletons, pairs, unions of two coalitions, and coalitions with one client more or less. `auto`: `all` if at most {LARGEST_EXACT} clients are left in the game, otherwise `merges`.",
    )

    def check(self, config: Config) -> None:
        """Check that the number of coalitions is small enough to enumerate.

        Raises
        ------
        ConfigError
            ``dcfcl-candidates = all`` with too many clients.
        """
        clients = config.stream.clients
        if self.dcfcl_candidates == "all" and clients > LARGEST_EXACT:
            raise ConfigError(
                f"dcfcl-candidates = 'all' with clients = {clients}: there are 2^{clients} coalitions, "
                f"which is too many above {LARGEST_EXACT} clients; use merges or auto"
            )


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


METHOD = Method(DcfclClient, "DCFCL", server="strategies.dcfcl:Dcfcl", keys=(DcfclKeys,), samples=chunk_alone)
