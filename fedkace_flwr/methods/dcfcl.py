"""What the two halves of DCFCL agree on."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key

LARGEST_EXACT = 20
"""Up to so many players every subset can be a candidate; there are 2^20 - 1 then."""


@dataclass(frozen=True)
class DcfclKeys:
    """DCFCL."""

    dcfcl_epsilon: float = key(0.2, "Weight of model similarity beside update similarity.", low=0)
    dcfcl_lambda: float = key(0.2, "Inferred: weight of distillation from the model of the round before.", low=0)
    dcfcl_temperature: float = key(2.0, "Temperature of distillation.", above=0)
    dcfcl_batch_norm: Literal["mean", "local"] = key(
        "mean", "Inferred: batch-norm statistics averaged within a coalition, or each client's own (`local`)."
    )
    dcfcl_distil_classes: Literal["old", "all"] = key(
        "old",
        "Inferred: distillation over the classes met before this round, or as in the published code over all outputs (`all`).",
    )
    dcfcl_candidates: Literal["auto", "all", "merges"] = key(
        "auto",
        f"Inferred: coalitions to consider. `all` subsets, for at most {LARGEST_EXACT} clients; `merges`: singletons, pairs, unions of two coalitions, and coalitions with one client more or less; `auto`: all where at most {LARGEST_EXACT} clients are left in the game, else merges.",
    )

    def check(self, config: Config) -> None:
        """Refuse to consider more coalitions than can be counted through.

        Raises
        ------
        ConfigError
            ``dcfcl-candidates = all`` with too many clients.
        """
        clients = config.stream.clients
        if self.dcfcl_candidates == "all" and clients > LARGEST_EXACT:
            raise ConfigError(
                f"dcfcl-candidates = 'all' with clients = {clients}: there are 2^{clients} coalitions, "
                f"too many beyond {LARGEST_EXACT} clients; use merges or auto"
            )
