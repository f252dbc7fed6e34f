"""What the two halves of FedCBDR agree on: its keys, the names in its messages, and its metrics."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import key
from fedkace_flwr.methods.metric import Bound, Metric

FEATURES_QUERY, SCORES_QUERY = "query.features", "query.scores"
"""Actions of the exchange: masked features against rows of U, rows of U against scores."""

FEATURES, ROWS, SCORES, LABELS, POSITIONS = "features", "rows", "scores", "labels", "positions"
"""Names of the arrays exchanged."""

SELECTION = "selection"
"""Record of the evaluation message that holds the kept positions."""

POOL_SIZE, SELECTED = "pool-size", "selected"
"""Names of its metrics."""


@dataclass(frozen=True)
class FedcbdrKeys:
    """FedCBDR."""

    fedcbdr_tau_old: float = key(0.9, "Temperature of the old classes' logits.", above=0)
    fedcbdr_tau_new: float = key(1.1, "Temperature of the chunk's classes' logits.", above=0)
    fedcbdr_weight_old: float = key(1.1, "Weight of the buffered samples' loss.", low=0)
    fedcbdr_weight_new: float = key(0.9, "Weight of the chunk's loss.", low=0)
    fedcbdr_new_columns: Literal["chunk", "novel"] = key(
        "chunk", "Inferred: new classes are those of the chunk, or only those never met before (`novel`)."
    )
    fedcbdr_temperatures: Literal["paper", "published-code"] = key(
        "paper",
        "Inferred: logits scaled by class, old and new samples averaged apart (`paper`), or scaled again by the sample's origin and averaged once (`published-code`).",
    )
    fedcbdr_scores: Literal["joint", "published-code"] = key(
        "joint",
        "Inferred: leverage from one SVD of all clients' features, each client's rotation taken off (`joint`), or from an SVD for each client with the rotation left on, so that only a client's total is right (`published-code`).",
    )
    fedcbdr_balanced: bool = key(
        True, "Inferred: draw class by class with equal quotas; false draws over all samples of a client."
    )
    fedcbdr_replacement: bool = key(
        False,
        "Inferred: draw with replacement, as the paper does; a sample drawn twice is kept once, so that the buffer holds fewer than M.",
    )


METRICS = (
    Metric(
        POOL_SIZE,
        "FedCBDR: samples of buffer and chunk together, from which the new buffer is drawn.",
        high=Bound("`capacity` and the samples of a chunk", lambda limits: limits.capacity + limits.examples),
        low=1,
        whole=True,
        unit="samples",
    ),
    Metric(
        SELECTED,
        "FedCBDR: whether the client's new buffer is the one that the server drew.",
        phase="evaluation",
        whole=True,
    ),
)
