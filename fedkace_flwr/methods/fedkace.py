"""What the two halves of FedKACE share: its keys and its metrics."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key
from fedkace_flwr.methods.metric import EPOCHS, Bound, Metric

GAP = "gap"
BUFFER_ACCURACY, BUFFER_PROBABILITY = "buffer-accuracy", "buffer-probability"
REPLAY_WEIGHTS, REPLAY_SKIPPED = "replay-weights", "replay-ratios-skipped"
CONDITION_NUMBER, CLASS_CONDITION_NUMBER = "condition-number", "class-condition-number"
"""Names of the metrics."""

_SHARE = 1 + 1e-6  # rounding may push a mean of probabilities slightly above 1
SINGULAR = 1e300
"""Condition number reported for a matrix that is singular in float64; messages and records hold finite numbers only."""


@dataclass(frozen=True)
class FedKaceKeys:
    """FedKACE."""

    gradient_norm: Literal["sum", "mean"] = key(
        "sum",
        "Reading: take the gradients of losses summed over each set (`sum`, the literal equations) or averaged per sample (`mean`).",
    )
    gradient_bias: bool = key(False, "Reading: whether the output layer's gradient norm includes its bias.")
    lambda_max: float = key(10000.0, "Reading: the replay weight is clipped to [0, lambda-max].", above=0)
    replay_classes: Literal["split", "seen"] = key(
        "split",
        "Reading: classes among which training distinguishes. `split`: the chunk's for new samples and those of earlier chunks for replayed ones (equations 5 and 6); `seen`: all classes met so far for both (section A.3).",
    )
    replay_weight: Literal["balanced", "one"] = key(
        "balanced",
        "Weight of the replay loss: set by gradient balance (`balanced`), or always 1 (`one`, ablation AS4).",
    )
    replay_gradient: Literal["output", "full"] = key(
        "output",
        "Gradient that the balance compares: that of the output layer (`output`), or that of the whole model at the cost of two more backward passes (`full`, ablation AS5).",
    )
    self_distance: Literal["include", "exclude"] = key(
        "include",
        "Reading: whether a buffered sample may be its own nearest neighbour (`include`: its diversity is 0) or not (`exclude`).",
    )
    quota: Literal["met", "all"] = key(
        "met",
        "Reading: classes among which the buffer's places are divided evenly: those `met` so far (section 4.3), or `all` classes from the first round, so that a class's share never changes.",
    )
    leftover: Literal["drop", "fill"] = key(
        "drop",
        "Reading: places left over by floor(M / classes) and by classes with few samples stay empty (`drop`) or go to other classes (`fill`).",
    )
    selection: Literal["hbms", "information", "random"] = key(
        "hbms",
        "How FedKACE selects its buffer: in both stages (`hbms`), by information for every class (`information`, ablation AS6), or at random class by class (`random`, ablation AS7).",
    )
    landmarks: int = key(
        0,
        "Number of uniformly drawn buffer samples to score against if the buffer is larger than that; 0: always score against the whole buffer.",
        unit="samples",
        low=0,
    )
    aggregation: Literal["mean", "none"] = key(
        "mean",
        "FedKACE's aggregation: the mean of the local models (`mean`), or none, so that each client keeps its own model (`none`, ablation LKC).",
    )
    patience: int = key(
        2,
        "Reading: number of consecutive rounds in which the gap must shrink before a client switches.",
        unit="rounds",
        low=1,
    )

    def check(self, config: Config) -> None:
        """Refuse keys of privacy and of aggregation if the server keeps each client's model, and two rules for places.

        Raises
        ------
        ConfigError
            ``aggregation = none`` together with ``dp``, ``secagg`` or an ``aggregation-rule``; ``quota = all``
            together with ``leftover = fill``.
        """
        if self.quota == "all" and self.leftover == "fill":
            raise ConfigError(
                "leftover = 'fill' with quota = 'all': would give the places of classes not yet met to the others; must "
                "be 'drop'"
            )
        if config.privacy.hides and self.aggregation != "mean":
            raise ConfigError(
                f"aggregation = {self.aggregation!r}: the server keeps each client's model, so dp and secagg "
                "protect nothing; must be 'mean'"
            )
        rule = config.aggregation.aggregation_rule
        if rule != "mean" and self.aggregation != "mean":
            raise ConfigError(
                f"aggregation-rule = {rule!r} with aggregation = {self.aggregation!r}: the server aggregates nothing; "
                "must be 'mean'"
            )


SWITCH_METRICS = (
    Metric(
        GAP,
        "FedKACE: difference between the global model's accuracy on the buffer and its mean probability of the true class; it decides when a client switches.",
        phase="evaluation",
        high=_SHARE,
        column="gap",
        tag="gap",
        average="gap",
    ),
    Metric(
        BUFFER_ACCURACY,
        "FedKACE: accuracy of the global model on the buffer.",
        phase="evaluation",
        high=_SHARE,
        column="buffer_accuracy",
        average="buffer_accuracy",
    ),
    Metric(
        BUFFER_PROBABILITY,
        "FedKACE: mean probability that the global model assigns to the true class of the buffer's samples.",
        phase="evaluation",
        high=_SHARE,
        column="buffer_probability",
        average="buffer_probability",
    ),
)
"""Measurements with which a client decides which model answers."""

REPLAY_METRICS = (
    Metric(
        REPLAY_WEIGHTS,
        "FedKACE: weight of the replay loss in each epoch; 1 in the first epoch.",
        high=Bound("max(1, `lambda-max`)", lambda limits: max(1.0, limits.config.of(FedKaceKeys).lambda_max)),
        length="epochs",
        column="replay_weights",
        tag="replay_weight",
        average="replay_weight",
    ),
    Metric(
        REPLAY_SKIPPED,
        "FedKACE: number of epochs whose ratio of gradient norms was not finite, so that the replay weight did not change.",
        high=EPOCHS,
        whole=True,
        unit="epochs",
        column="replay_ratios_skipped",
    ),
)
"""Results of gradient balance in training."""

BUFFER_METRICS = (
    Metric(
        CONDITION_NUMBER,
        "FedKACE: condition number of the new buffer's kernel matrix, 1e+300 if the matrix is singular; reported only with `diagnostics`.",
        high=SINGULAR,
        column="condition_number",
        tag="condition_number",
        average="condition_number",
        average_by="median",
    ),
    Metric(
        CLASS_CONDITION_NUMBER,
        "FedKACE: mean over classes of the condition number of each class's own kernel matrix (section B.4), 1e+300 if one of the matrices is singular; reported only with `diagnostics`.",
        high=SINGULAR,
        column="class_condition_number",
        tag="class_condition_number",
        average="class_condition_number",
        average_by="median",
    ),
)
"""Properties of the new buffer."""
