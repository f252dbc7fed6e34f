"""What the two halves of FedCBDR share: its keys, the names in its messages, and its metrics."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import key
from fedkace_flwr.methods.metric import Bound, Metric

FEATURES_QUERY, SCORES_QUERY = "query.features", "query.scores"
"""Actions of the exchange: the first collects masked features, the second sends rows of U and collects scores."""

FEATURES, ROWS, SCORES, LABELS, POSITIONS = "features", "rows", "scores", "labels", "positions"
"""Names of the arrays exchanged."""

SELECTION = "selection"
"""Record of the evaluation message that holds the positions of the samples to keep."""

POOL_SIZE, SELECTED = "pool-size", "selected"
"""Names of the metrics."""


@dataclass(frozen=True)
class FedcbdrKeys:
    """FedCBDR."""

    fedcbdr_tau_old: float = key(0.9, "Temperature for the logits of old classes.", above=0)
    fedcbdr_tau_new: float = key(1.1, "Temperature for the logits of the chunk's classes.", above=0)
    fedcbdr_weight_old: float = key(1.1, "Weight of the buffered samples' loss.", low=0)
    fedcbdr_weight_new: float = key(0.9, "Weight of the chunk's loss.", low=0)
    fedcbdr_new_columns: Literal["chunk", "novel"] = key(
        "chunk", "Inferred: treat all classes of the chunk as new (`chunk`), or only those never seen before (`novel`)."
    )
    fedcbdr_temperatures: Literal["paper", "published-code"] = key(
        "paper",
        "Inferred: scale logits by class and average old and new samples separately (`paper`), or scale them again by the sample's origin and average all samples together (`published-code`).",
    )
    fedcbdr_scores: Literal["joint", "published-code"] = key(
        "joint",
        "Inferred: compute leverage scores from one SVD of all clients' features and undo each client's rotation (`joint`), or from one SVD per client without undoing the rotation, so that only each client's total is correct (`published-code`).",
    )
    fedcbdr_balanced: bool = key(
        True, "Inferred: draw class by class with equal quotas; `false` draws from all of a client's samples at once."
    )
    fedcbdr_replacement: bool = key(
        False,
        "Inferred: draw with replacement, as the paper does; a sample drawn twice is kept only once, so the buffer may hold fewer than M samples.",
    )


METRICS = (
    Metric(
        POOL_SIZE,
        "FedCBDR: number of samples in buffer and chunk together, from which the new buffer is drawn.",
        high=Bound("`capacity` plus the samples of a chunk", lambda limits: limits.capacity + limits.examples),
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
