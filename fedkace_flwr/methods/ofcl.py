"""What the two halves of OFCL share: its keys and its metric."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.config import Config
from fedkace_flwr.keys import key
from fedkace_flwr.methods.metric import Bound, Metric

CHUNK_CLASSES = "chunk-classes"
"""Name of the metric: number of samples of each class in the chunk."""


@dataclass(frozen=True)
class OfclKeys:
    """OFCL."""

    ofcl_views: Literal["per-sample", "per-batch"] = key(
        "per-sample",
        "Inferred: draw the parameters of the 12 views for each image (`per-sample`), or once for all images, as the published code does (`per-batch`).",
    )
    ofcl_rescore: Literal["current", "all"] = key(
        "current", "Inferred: rescore only the chunk's classes each round (`current`), or all classes (`all`)."
    )
    ofcl_merge: Literal["global", "half"] = key(
        "global",
        "Inferred: a client starts its round from the global model (`global`), or from the midpoint between it and the client's own last local model, as in the published code (`half`).",
    )
    ofcl_aggregation: Literal["mean", "class-mean"] = key(
        "mean",
        "Inferred: aggregate by the mean of the local models (`mean`), or by the midpoint between the previous global model and the mean of one model per class, as in the published code (`class-mean`). For `class-mean`, clients report the class counts of their chunks regardless of `report-classes`.",
    )


def samples(config: Config, round_number: int) -> int:
    """Count the samples of an epoch: the chunk and, once there is a buffer, an equal number drawn from it."""
    return config.mean_chunk * (2 if round_number > 1 else 1)


METRICS = (
    Metric(
        CHUNK_CLASSES,
        "OFCL: number of samples of each class in the chunk; reported only with `ofcl-aggregation = class-mean`.",
        high=Bound("samples of a chunk", lambda limits: limits.examples),
        whole=True,
        length="classes",
        unit="samples",
    ),
)
