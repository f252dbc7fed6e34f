"""What the two halves of TFCL share: its keys and the names in its messages."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key

HEAD_ACTION, TAIL_ACTION = "train.head", "train.tail"
"""Actions of the exchange.

The first trains the first half of a round and returns what the server learns from; the second sends the server's
logits and trains the rest.
"""

FEATURES, LOGITS, LABELS, SEEN = "features", "logits", "labels", "seen"
"""Names of the arrays exchanged."""


@dataclass(frozen=True)
class TfclKeys:
    """TFCL."""

    tfcl_label_weight: float = key(
        0.9, "Weight of the label loss relative to distillation, on both sides.", low=0, high=1
    )
    tfcl_temperature: float = key(5.0, "Temperature of distillation.", above=0)
    tfcl_server_epochs: int = key(
        20, "Number of epochs that the server's network trains per round.", unit="epochs", low=1
    )
    tfcl_pick_learning_rate: float = key(0.0001, "Learning rate of Adam for the pick mask.", above=0)
    tfcl_loss: Literal["cross-entropy", "bce"] = key(
        "cross-entropy", "Inferred: label loss; the published code uses `bce`."
    )
    tfcl_inference: Literal["latest", "most-confident"] = key(
        "latest",
        "Inferred: answer with the latest sub-model (`latest`), or with the most confident of all (`most-confident`).",
    )
    tfcl_head: Literal["fresh", "copy"] = key(
        "fresh",
        "Inferred: the output layer of a new sub-model starts from the run's initial weights, as published (`fresh`), or from its weights at the end of the previous round (`copy`).",
    )
    tfcl_prune: Literal["within-round", "literal"] = key(
        "within-round",
        "Inferred: prune a sub-model to its share in the round that opens it (`within-round`), or not before its second round, as the published code does (`literal`). With `literal` and one round per sub-model, the first claims all weights and the others get none.",
    )
    tfcl_trace: Literal["round", "class-set"] = key(
        "round",
        "Inferred: each round opens a new sub-model (`round`), or a chunk with exactly the same classes as an earlier chunk continues that chunk's sub-model (`class-set`).",
    )
    tfcl_group: Literal["round", "class-overlap"] = key(
        "round",
        "Inferred: the server trains one network for all clients of a round (`round`), or one for each group of clients whose chunks have overlapping classes (`class-overlap`).",
    )
    tfcl_group_jaccard: float = key(
        0.5,
        "Inferred: with `class-overlap`, smallest Jaccard index (common classes over all classes of both chunks) at which two clients belong to the same group.",
        low=0,
        high=1,
    )

    def check(self, config: Config) -> None:
        """Check that TFCL's sub-models have output layers of their own.

        Raises
        ------
        ConfigError
            The output layer is fixed.
        """
        if config.method == "tfcl" and config.model.output_layer != "learned":
            raise ConfigError(
                f"output-layer = {config.model.output_layer!r}: TFCL's sub-models and its server learn their output "
                "layers; must be 'learned'"
            )
