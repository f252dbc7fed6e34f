"""The client of Fed-TaLoRA: federated averaging of low-rank adapters that all tasks share."""

from fedkace_flwr.clients.base import ClientRule
from fedkace_flwr.config import Config
from fedkace_flwr.networks.lora import DOWN, UP
from fedkace_flwr.registry import Method, Traffic


class FedTaLoraClient(ClientRule):
    """Fed-TaLoRA (Yu, Hu and Min, arXiv 2505.12318, 2025): one set of adapters, whose products are averaged exactly.

    Clients train adapters and output layer by cross-entropy over all classes met, without a buffer. No task has adapters
    of its own, so nobody needs to know tasks. The server (:class:`fedkace_flwr.strategies.fed_talora.FedTaLora`) adds
    what the mean of the adapters lacks to the weights that they adapt, as in FedEx-LoRA (Singhal et al., ACL 2025).

    We read the abstract, the introduction and the description of a round. Inferred: adapters belong to all linear
    layers, convolutions and attention (the publication's to a ViT's attention and feed-forward layers); their rank is
    ``lora-rank``; samples weight the mean; the server sends the weights that it changes whole, so that a client that
    has missed rounds has them as well.
    """


def trains(config: Config, name: str) -> bool:
    """Whether an array of the network trains, and is in replies: the output layer's and the adapters'."""
    return name.startswith("output.") or name.endswith((DOWN, UP))


METHOD = Method(
    FedTaLoraClient,
    "Fed-TaLoRA",
    server="fedkace_flwr.strategies.fed_talora:FedTaLora",
    preset={"trainable": "lora"},
    replies=trains,
    moves_adapted=True,
    replays=False,
    traffic=Traffic(up="P + R"),
)
