"""The keys of DER++."""

from dataclasses import dataclass

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class DerppKeys:
    """DER++."""

    derpp_alpha: float = key(
        0.1, "Weight alpha of the squared distance from the stored logits; takes the place of `stored-logits`.", low=0
    )
    derpp_beta: float = key(0.5, "Weight beta of the replayed samples' label loss.", low=0)
