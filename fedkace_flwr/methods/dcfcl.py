"""What the two halves of DCFCL share: its keys."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key

LARGEST_EXACT = 20
"""Largest number of players for which every nonempty subset can be a candidate (2^20 - 1 subsets)."""


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
