"""What the two halves of Re-Fed agree on."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class RefedKeys:
    """Re-Fed."""

    refed_lambda: float = key(
        0.5, "Inferred: how local the informative model is; 1 ignores the global model.", above=0, high=1
    )
    refed_steps: int = key(5, "Inferred: steps of the informative model, s.", unit="steps", low=1)
    refed_learning_rate: float = key(0.01, "Inferred: step size of the informative model.", above=0)
    refed_reduction: Literal["mean", "sum"] = key(
        "mean", "Inferred: the informative model follows the mean or the sum of the gradients."
    )
    refed_gradient: Literal["full", "last-layer"] = key(
        "full", "Inferred: gradient norms over all parameters, or the last layer's alone."
    )
    refed_power: int = key(1, "Inferred: gradient norms as they are (1) or squared (2).", low=1, high=2)
    refed_start: Literal["global", "local", "persistent"] = key(
        "global",
        "Inferred: the informative model starts as the global model that pulls it, the round's local model (`local`), or as it ended the last time (`persistent`).",
    )
    refed_anchor: Literal["current", "previous"] = key(
        "current",
        "Inferred: score when the round's global model has come, or (`previous`) right after local training, the global model before it in the other's place.",
    )
