"""The one place where a method is registered: name, server half, client half, preset."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from clients.base import ContinualClient
from clients.fedkace import FedKaceClient
from fedkace_flwr.config import Scalar
from fedkace_flwr.errors import ConfigError
from strategies.base import ContinualStrategy
from strategies.fedkace import FedKace


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes
    ----------
    strategy, client : type
        Server and client half.
    preset : mapping
        Configuration keys that the method fixes.
    """

    strategy: type[ContinualStrategy]
    client: type[ContinualClient]
    preset: Mapping[str, Scalar] = field(default_factory=dict)


METHODS: dict[str, Method] = {
    "fedkace": Method(FedKace, FedKaceClient),
}


def find_method(name: str) -> Method:
    """Look a method up.

    Raises
    ------
    ConfigError
        No method of that name.
    """
    if name not in METHODS:
        raise ConfigError(f"method = {name!r}: must be one of {', '.join(sorted(METHODS))}")
    return METHODS[name]
