"""The key of FedProx."""

from dataclasses import dataclass

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class FedProxKeys:
    """FedProx."""

    fedprox_mu: float = key(
        0.01, "Weight mu of the proximal term: half the squared distance of the parameters from those received.", low=0
    )
