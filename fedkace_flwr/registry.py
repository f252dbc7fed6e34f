"""The registry of methods: a table of names, each of which leads to what the program needs to know of the method.

A method is imported when it is asked for. One of another package is found by its entry point
(:mod:`fedkace_flwr.plugins`) and stands in the table from then on.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from fedkace_flwr import plugins
from fedkace_flwr.keys import Scalar

if TYPE_CHECKING:
    from fedkace_flwr.clients.base import ClientRule
    from fedkace_flwr.config import Config
    from fedkace_flwr.messaging.metrics import Metric
    from fedkace_flwr.strategies.base import ServerRule

Role = Literal["method", "rival", "ablation", "reference"]
"""The role of a method in a comparison: the project's own method, one that it is compared with (rival), a variant of it
with a part switched off (ablation), or the reference against which regret is measured."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a client receives and sends in a round without failures, as formulas over symbols.

    ``docs/methods.md`` explains the symbols. By default, both messages of a round carry a model, and one reply does;
    where :attr:`Method.replies` declares a part, the reply takes ``P + R``.
    """

    down: str = "2*(S + c)"
    up: str = "S + R"


@dataclass(frozen=True)
class Method:
    """A method, as ``METHOD`` in the module of its client half declares it.

    Attributes
    ----------
    client : type
        Class with the hooks of the client half.
    label : str
        Name in reports; if empty, the name under which it is registered.
    server : type or str
        Class with the hooks of the server half, or ``module:class``, which is imported when it is needed. By default
        the plain mean of the local models.
    role : {"method", "rival", "ablation", "reference"}
        Role in a comparison.
    preset : mapping
        Configuration keys whose values the method fixes.
    keys : tuple of type
        Its sections of the configuration; see :mod:`fedkace_flwr.keys`.
    metrics : tuple of Metric
        Metrics that it reports in addition to the common ones (:data:`fedkace_flwr.messaging.metrics.COMMON`).
    actions : tuple of str
        Message types of its own within a round, ``train.NAME`` or ``query.NAME``.
    sends_labels : bool
        Whether its messages contain the labels of a client's samples, as its publication or an inferred choice
        requires. The contract tests check that no other method sends labels. Class histograms are metrics
        (``report-classes``) and do not count as labels here.
    is_mean : bool
        Whether the server uses nothing but the mean of its clients' models, so that a noisy mean or the sum of
        masked updates is sufficient.
    switches : bool
        Whether a client starts with its local model and may go over to the global one, unless ``predict-with`` says
        otherwise.
    replies : callable, optional
        Whether a client's reply to training holds an array of the network, from the configuration and the array's
        name; by default it holds all. The server keeps what it has of the others.
    moves_adapted : bool
        Whether its server changes the weights that have adapters (``trainable = lora``). They are then not frozen: the
        models that the server sends hold them.
    splits : bool
        Whether it trains the halves of the network apart, which not every network permits, and without sending weights.
    needs_stream : bool
        Whether a client rereads chunks of earlier rounds, which only a simulated stream can provide.
    replays : bool
        Whether a client trains on a buffer too. One that does not keeps the buffer of an earlier run for a later one.
    samples : callable, optional
        Computes the samples in an epoch of a client's training, on average over clients, from the configuration and
        the round, for estimates; by default those of the chunk and, with ``replays``, of the buffer.
    tests : int
        Largest number of models that a client tests in a round if no key asks for more, for estimates.
    traffic : Traffic
        Bytes that a client receives and sends in a round.
    """

    client: "type[ClientRule]"
    label: str = ""
    server: "type[ServerRule] | str" = "fedkace_flwr.strategies.base:ServerRule"
    role: Role = "rival"
    preset: Mapping[str, Scalar] = field(default_factory=dict)
    keys: tuple[type, ...] = ()
    metrics: "tuple[Metric, ...]" = ()
    actions: tuple[str, ...] = ()
    sends_labels: bool = False
    is_mean: bool = False
    switches: bool = False
    replies: "Callable[[Config, str], bool] | None" = None
    moves_adapted: bool = False
    splits: bool = False
    needs_stream: bool = False
    replays: bool = True
    samples: "Callable[[Config, int], int] | None" = None
    tests: int = 1
    traffic: Traffic = Traffic()

    @property
    def strategy(self) -> "type[ServerRule]":
        """The class of the server half."""
        return _imported(self.server) if isinstance(self.server, str) else self.server


class _Methods(MutableMapping[str, Method]):
    def __init__(self, table: Mapping[str, str]) -> None:
        self._entries: dict[str, Method | str] = dict(table)

    def __getitem__(self, name: str) -> Method:
        entry = self._entries[name]
        if isinstance(entry, str):
            self._entries[name] = entry = _imported(entry)
        return entry

    def __setitem__(self, name: str, method: Method) -> None:
        self._entries[name] = method

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


METHODS = _Methods(
    {
        "fedkace": "fedkace_flwr.clients.fedkace:METHOD",
        "fedavg": "fedkace_flwr.clients.fedavg:METHOD",
        "fedcbdr": "fedkace_flwr.clients.fedcbdr:METHOD",
        "ofcl": "fedkace_flwr.clients.ofcl:METHOD",
        "refed": "fedkace_flwr.clients.refed:METHOD",
        "tfcl": "fedkace_flwr.clients.tfcl:METHOD",
        "dcfcl": "fedkace_flwr.clients.dcfcl:METHOD",
        "er": "fedkace_flwr.clients.er:METHOD",
        "er-balanced": "fedkace_flwr.clients.er:BALANCED",
        "er-ace": "fedkace_flwr.clients.er_ace:METHOD",
        "fedframe": "fedkace_flwr.clients.fedframe:METHOD",
        "derpp": "fedkace_flwr.clients.derpp:METHOD",
        "fedprox": "fedkace_flwr.clients.fedprox:METHOD",
        "scaffold": "fedkace_flwr.clients.scaffold:METHOD",
        "afl": "fedkace_flwr.clients.afl:METHOD",
        "fed-talora": "fedkace_flwr.clients.fed_talora:METHOD",
        "flwf": "fedkace_flwr.clients.flwf:METHOD",
        "lkc": "fedkace_flwr.clients.fedkace:LKC",
        "as1": "fedkace_flwr.clients.fedkace:AS1",
        "as2": "fedkace_flwr.clients.fedkace:AS2",
        "as3": "fedkace_flwr.clients.fedkace:AS3",
        "as4": "fedkace_flwr.clients.fedkace:AS4",
        "as5": "fedkace_flwr.clients.fedkace:AS5",
        "as6": "fedkace_flwr.clients.fedkace:AS6",
        "as7": "fedkace_flwr.clients.fedkace:AS7",
        "as8": "fedkace_flwr.clients.fedkace:AS8",
        "centralized": "fedkace_flwr.clients.centralized:METHOD",
    }
)
"""All methods by name; reports list the methods of each role in this order. Other packages' are added when first named."""

OWN_METHODS = tuple(METHODS)
"""The names of the methods that come with the package."""


def of_another_package(name: str) -> Method | None:
    """Import the method that another package adds under a name; None if there is no such entry point.

    Raises
    ------
    ConfigError
        It cannot be loaded, or is not a :class:`Method`.
    """
    method = plugins.loaded("method", name)
    if method is None or isinstance(method, Method):
        return method
    raise plugins.broken("method", name, "must be a fedkace_flwr.registry.Method")
