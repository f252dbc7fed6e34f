"""Which of a network's arrays travel between server and clients.

Messages, checks, defence, noise and secure aggregation all ask :class:`Travelling`.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Self

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.messaging.wire import Shapes

MEAN, VARIANCE = ".running_mean", ".running_var"


@dataclass(frozen=True)
class Travelling:
    """The arrays that travel, in the network's order.

    Attributes
    ----------
    held : mapping
        Name, shape and dtype of each array of the network.
    sent : mapping
        Those of a model that the server sends: all but the frozen ones, which everyone has.
    replied : mapping
        Those of a reply to training. Of a local model, the server takes the others to be as it sent them.
    parameters : frozenset of str
        Names of those in a reply that are trained by gradient.
    update : tuple of str
        Names of those that leave a client if ``dp``, ``secagg`` or ``batchnorm-statistics`` ask for less than whole
        replies. Batch counters do not: nothing is computed from them, they would dominate the norm, and they reveal
        the number of samples. A fixed output layer, which is no parameter, does not either: everyone has it.
    """

    held: Shapes
    sent: Shapes
    replied: Shapes
    parameters: frozenset[str]
    update: tuple[str, ...]

    @classmethod
    def of(
        cls,
        shapes: Shapes,
        parameters: Set[str],
        config: Config,
        replies: Callable[[Config, str], bool] | None = None,
        frozen: Set[str] = frozenset(),
    ) -> Self:
        """Which arrays travel in a run.

        Parameters
        ----------
        shapes : mapping
            Name, shape and dtype of each array of the network.
        parameters : set of str
            Names of those that are trained by gradient.
        config : Config
            The configuration.
        replies : callable, optional
            Whether a reply holds an array, as :class:`fedkace_flwr.registry.Method` declares it.
        frozen : set of str
            Names of the arrays that never change.

        Raises
        ------
        ConfigError
            A reply would hold none.
        """
        sent = {name: shape for name, shape in shapes.items() if name not in frozen}
        replied = {name: shape for name, shape in sent.items() if replies is None or replies(config, name)}
        if not replied:
            raise ConfigError(
                f"method = {config.method!r}: its clients' replies hold no array of network = "
                f"{config.model.network!r}; must hold at least one"
            )
        trained = frozenset(name for name in replied if name in parameters)
        shared = config.privacy.batchnorm_statistics == "shared"
        update = tuple(name for name in replied if name in trained or (shared and name.endswith((MEAN, VARIANCE))))
        return cls(shapes, sent, replied, trained, update)
