"""What the two halves of TFCL agree on."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import key

HEAD_ACTION, TAIL_ACTION = "train.head", "train.tail"
"""Actions of the exchange: the first half of a round against what the server learns from, its logits against the rest."""

FEATURES, LOGITS, LABELS, SEEN = "features", "logits", "labels", "seen"
"""Names of the arrays exchanged."""


@dataclass(frozen=True)
class TfclKeys:
    """TFCL."""

    tfcl_label_weight: float = key(0.9, "Weight of the label loss beside distillation, on both sides.", low=0, high=1)
    tfcl_temperature: float = key(5.0, "Temperature of distillation.", above=0)
    tfcl_server_epochs: int = key(20, "Epochs of the server's network per round.", unit="epochs", low=1)
    tfcl_pick_learning_rate: float = key(0.0001, "Adam's learning rate for the pick mask.", above=0)
    tfcl_loss: Literal["cross-entropy", "bce"] = key(
        "cross-entropy", "Inferred: label loss; `bce` is the published code's."
    )
    tfcl_inference: Literal["latest", "most-confident"] = key(
        "latest", "Inferred: answer by the latest sub-model, or by the most confident of all (`most-confident`)."
    )
    tfcl_head: Literal["fresh", "copy"] = key(
        "fresh",
        "Inferred: a new sub-model's output layer starts from the run's initial weights as published, or as it was at the end of the round before (`copy`).",
    )
    tfcl_prune: Literal["within-round", "literal"] = key(
        "within-round",
        "Inferred: a sub-model is pruned to its share in the round that opens it, or as the published code does not before its second (`literal`): with one round each, the first claims all weights and no other gets any.",
    )
    tfcl_trace: Literal["round", "class-set"] = key(
        "round",
        "Inferred: each round opens a sub-model, or a chunk of exactly the classes of an earlier one goes on with that one's (`class-set`).",
    )
    tfcl_group: Literal["round", "class-overlap"] = key(
        "round",
        "Inferred: one network at the server for all clients of a round, or one for each group of clients whose chunks' classes overlap (`class-overlap`).",
    )
    tfcl_group_jaccard: float = key(
        0.5,
        "Inferred: from which share of common classes, of all classes of both chunks, on two clients are of one group with `class-overlap`.",
        low=0,
        high=1,
    )
