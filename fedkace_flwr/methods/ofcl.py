"""What the two halves of OFCL agree on: its keys and its metric."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.config import Config
from fedkace_flwr.keys import key
from fedkace_flwr.methods.metric import Bound, Metric

CHUNK_CLASSES = "chunk-classes"
"""Name of a metric: samples of each class in the chunk."""


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


def samples(config: Config, round_number: int) -> int:
    """Count the samples of an epoch: the chunk and, once there is a buffer, as many draws from it."""
    return config.largest_chunk * (2 if round_number > 1 else 1)


METRICS = (
    Metric(
        CHUNK_CLASSES,
        "OFCL: samples of each class in the chunk; with `ofcl-aggregation = class-mean` alone.",
        high=Bound("samples of a chunk", lambda limits: limits.examples),
        whole=True,
        length="classes",
        unit="samples",
    ),
)
