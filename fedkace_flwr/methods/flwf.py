"""The keys of FLwF."""

from dataclasses import dataclass

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class FlwfKeys:
    """FLwF."""

    flwf_lambda: float = key(1.0, "Weight of distillation from the received model.", low=0)
    flwf_temperature: float = key(2.0, "Temperature of distillation.", above=0)
