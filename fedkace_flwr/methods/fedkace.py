"""What the two halves of FedKACE agree on: its keys and its metrics."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key
from fedkace_flwr.methods.metric import EPOCHS, Bound, Metric

GAP = "gap"
BUFFER_ACCURACY, BUFFER_PROBABILITY = "buffer-accuracy", "buffer-probability"
REPLAY_WEIGHTS, REPLAY_SKIPPED = "replay-weights", "replay-ratios-skipped"
CONDITION_NUMBER = "condition-number"
"""Names of its metrics."""

_SHARE = 1 + 1e-6  # rounding may carry a mean of probabilities a little beyond 1
_LARGEST_CONDITION = 1e300  # sums of condition numbers stay finite


@dataclass(frozen=True)
class FedKaceKeys:
    """FedKACE."""

    gradient_norm: Literal["sum", "mean"] = key(
        "sum",
        "Reading: gradients of the losses summed over each set (`sum`, the literal equations) or averaged per sample (`mean`).",
    )
    gradient_bias: bool = key(False, "Reading: whether the output layer's bias takes part in its gradient norm.")
    lambda_max: float = key(10000.0, "Reading: the replay weight is clipped to [0, lambda-max].", above=0)
    replay_weight: Literal["balanced", "one"] = key(
        "balanced", "Weight of the replay loss: by gradient balance, or 1 throughout (ablation AS4)."
    )
    replay_gradient: Literal["output", "full"] = key(
        "output",
        "Whose gradient the balance compares: the output layer's, or the whole model's at two more backward passes (ablation AS5).",
    )
    self_distance: Literal["include", "exclude"] = key(
        "include",
        "Reading: whether a buffered sample counts as its own nearest neighbour (`include`: its diversity is 0) or not (`exclude`).",
    )
    leftover: Literal["drop", "fill"] = key(
        "drop",
        "Reading: places left by floor(M / classes) and by classes with few samples stay empty (`drop`) or go to the other classes (`fill`).",
    )
    selection: Literal["hbms", "information", "random"] = key(
        "hbms",
        "FedKACE's buffer: both stages (`hbms`), sampling by information for every class (`information`, ablation AS6), or drawn at random class by class (`random`, ablation AS7).",
    )
    landmarks: int = key(
        0,
        "Score against so many uniformly drawn buffer samples instead of the whole buffer where the buffer is larger; 0: always the whole buffer.",
        unit="samples",
        low=0,
    )
    aggregation: Literal["mean", "none"] = key(
        "mean",
        "FedKACE's server: the mean of the local models, or `none`, where each client keeps its own (ablation LKC).",
    )
    patience: int = key(
        2, "Reading: consecutive rounds in which the gap must shrink before a client switches.", unit="rounds", low=1
    )

    def check(self, config: Config) -> None:
        """Refuse to hide updates from a server that keeps each client's model.

        Raises
        ------
        ConfigError
            ``aggregation = none`` together with ``dp`` or ``secagg``.
        """
        if config.privacy.hides and self.aggregation != "mean":
            raise ConfigError(
                f"aggregation = {self.aggregation!r}: the server keeps each client's model, so dp and secagg "
                "protect nothing; must be 'mean'"
            )


SWITCH_METRICS = (
    Metric(
        GAP,
        "FedKACE: how far the global model's accuracy on the buffer and its mean probability of the true class are apart; a client switches by it.",
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
        "FedKACE: mean probability that the global model gives the true class of the buffer's samples.",
        phase="evaluation",
        high=_SHARE,
        column="buffer_probability",
        average="buffer_probability",
    ),
)
"""What a client measures to decide which model answers."""

REPLAY_METRICS = (
    Metric(
        REPLAY_WEIGHTS,
        "FedKACE: weight of the replay loss in each epoch; 1 in the first.",
        high=Bound("max(1, `lambda-max`)", lambda limits: max(1.0, limits.config.of(FedKaceKeys).lambda_max)),
        length="epochs",
        column="replay_weights",
        tag="replay_weight",
        average="replay_weight",
    ),
    Metric(
        REPLAY_SKIPPED,
        "FedKACE: epochs whose ratio of gradient norms was not finite, so that the replay weight stayed as it was.",
        high=EPOCHS,
        whole=True,
        unit="epochs",
        column="replay_ratios_skipped",
    ),
)
"""What gradient balance did in training."""

BUFFER_METRICS = (
    Metric(
        CONDITION_NUMBER,
        "FedKACE: condition number of the kernel matrix of the new buffer; with `diagnostics` alone.",
        high=_LARGEST_CONDITION,
        column="condition_number",
        tag="condition_number",
        average="condition_number",
    ),
)
"""What the new buffer is like."""
