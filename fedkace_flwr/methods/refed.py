"""What the two halves of Re-Fed share: its keys."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class RefedKeys:
    """Re-Fed."""

    refed_lambda: float = key(
        0.5,
        "Inferred: how strongly the informative model is personalised; 1 ignores the global model.",
        above=0,
        high=1,
    )
    refed_steps: int = key(5, "Inferred: number of training steps of the informative model, s.", unit="steps", low=1)
    refed_learning_rate: float = key(0.01, "Inferred: step size of the informative model.", above=0)
    refed_reduction: Literal["mean", "sum"] = key(
        "mean", "Inferred: train the informative model on the mean or on the sum of the gradients."
    )
    refed_gradient: Literal["full", "last-layer"] = key(
        "full",
        "Inferred: take gradient norms over all parameters (`full`), or over the last layer only (`last-layer`).",
    )
    refed_power: int = key(1, "Inferred: use gradient norms as they are (1) or squared (2).", low=1, high=2)
    refed_start: Literal["global", "local", "persistent"] = key(
        "global",
        "Inferred: the informative model starts from the global model that it is pulled towards (`global`), from the round's local model (`local`), or from where it ended the last time (`persistent`).",
    )
    refed_anchor: Literal["current", "previous"] = key(
        "current",
        "Inferred: score with the round's new global model once it arrives (`current`), or right after local training with the global model from the start of the round (`previous`).",
    )
