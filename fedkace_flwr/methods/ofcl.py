"""What the two halves of OFCL agree on."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class OfclKeys:
    """OFCL."""

    ofcl_views: Literal["per-sample", "per-batch"] = key(
        "per-sample",
        "Inferred: the 12 views draw their parameters for each image, or once for all as the published code does.",
    )
    ofcl_rescore: Literal["current", "all"] = key(
        "current", "Inferred: score the chunk's classes each round, or all classes."
    )
    ofcl_merge: Literal["global", "half"] = key(
        "global",
        "Inferred: a client starts its round as the global model, or half-way from it to its own last local model (`half`, the published code's).",
    )
    ofcl_aggregation: Literal["mean", "class-mean"] = key(
        "mean",
        "Inferred: the mean of the local models, or (`class-mean`, the published code's) the mean of one model per class, half-way to the global model before; for it clients report the class counts of their chunks, whatever `report-classes` says.",
    )
