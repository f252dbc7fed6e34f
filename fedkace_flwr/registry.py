"""The one place where a method is registered: name, server half, client half, preset."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from clients.base import ClientRule
from clients.centralized import CentralizedClient
from clients.dcfcl import DcfclClient
from clients.er import ReplayClient
from clients.fedcbdr import FedCbdrClient
from clients.fedkace import FedKaceClient
from clients.ofcl import OfclClient
from clients.refed import RefedClient
from clients.tfcl import TfclClient
from fedkace_flwr.config import Config, register_section
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import Scalar
from fedkace_flwr.methods.centralized import CentralizedKeys
from fedkace_flwr.methods.dcfcl import DcfclKeys
from fedkace_flwr.methods.fedcbdr import FedcbdrKeys
from fedkace_flwr.methods.fedkace import FedKaceKeys
from fedkace_flwr.methods.ofcl import OfclKeys
from fedkace_flwr.methods.refed import RefedKeys
from fedkace_flwr.methods.tfcl import TfclKeys
from strategies.base import ContinualStrategy
from strategies.centralized import Centralized
from strategies.dcfcl import Dcfcl
from strategies.fedavg import FedAvg
from strategies.fedcbdr import FedCbdr
from strategies.fedkace import FedKace
from strategies.ofcl import Ofcl
from strategies.tfcl import Tfcl


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes
    ----------
    strategy, client : type
        Server and client half.
    preset : mapping
        Configuration keys that the method fixes.
    actions : tuple of str
        Messages of its own inside a round, ``train.NAME`` or ``query.NAME``.
    sends_labels : bool
        Whether its messages hold the labels of a client's samples, as its publication or an inferred choice needs;
        of every other method the contract checks that none does. Class histograms are metrics (``report-classes``).
    is_mean : bool
        Whether all that the server makes of its clients' messages is the mean of their models, so that noise on the
        mean and sums of masked updates will do.
    needs_stream : bool
        Whether a client reads chunks of earlier rounds again, which only a simulated stream can give.
    """

    strategy: type[ContinualStrategy]
    client: type[ClientRule]
    preset: Mapping[str, Scalar] = field(default_factory=dict)
    actions: tuple[str, ...] = ()
    sends_labels: bool = False
    is_mean: bool = False
    needs_stream: bool = False


METHODS: dict[str, Method] = {
    "fedkace": Method(FedKace, FedKaceClient, is_mean=True),
    "as1": Method(FedKace, FedKaceClient, {"patience": 1}, is_mean=True),
    "as2": Method(FedKace, FedKaceClient, {"inference": "global"}, is_mean=True),
    "as3": Method(FedKace, FedKaceClient, {"inference": "local"}, is_mean=True),
    "as4": Method(FedKace, FedKaceClient, {"replay-weight": "one"}, is_mean=True),
    "as5": Method(FedKace, FedKaceClient, {"replay-gradient": "full"}, is_mean=True),
    "as6": Method(FedKace, FedKaceClient, {"selection": "information"}, is_mean=True),
    "as7": Method(FedKace, FedKaceClient, {"selection": "random"}, is_mean=True),
    "as8": Method(FedKace, FedKaceClient, {"replay-weight": "one", "selection": "random"}, is_mean=True),
    "lkc": Method(FedKace, FedKaceClient, {"aggregation": "none"}),
    "fedavg": Method(FedAvg, ClientRule, is_mean=True),
    "centralized": Method(Centralized, CentralizedClient, needs_stream=True),
    "fedcbdr": Method(FedCbdr, FedCbdrClient, actions=("query.features", "query.scores"), sends_labels=True),
    "dcfcl": Method(Dcfcl, DcfclClient),
    "ofcl": Method(Ofcl, OfclClient),
    "refed": Method(ContinualStrategy, RefedClient, is_mean=True),
    "tfcl": Method(Tfcl, TfclClient, actions=("train.head", "train.tail"), sends_labels=True),
    "er": Method(ContinualStrategy, ReplayClient, is_mean=True),
}


for _section in (FedKaceKeys, RefedKeys, OfclKeys, FedcbdrKeys, TfclKeys, DcfclKeys, CentralizedKeys):
    register_section(_section)


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


def configured(config: Config) -> tuple[Method, Config]:
    """The method a configuration names, and the configuration with that method's preset in force.

    With differential privacy or secure aggregation no class histograms are reported: they would tell what the
    models do not.

    Raises
    ------
    ConfigError
        No method of that name, or one that cannot do what the keys of privacy ask.
    """
    method = find_method(config.method)
    config = Config.parse({**config.flat(), **method.preset})
    _check_privacy(method, config)
    if method.needs_stream and config.data.data_source != "stream":
        raise ConfigError(f"method = {config.method!r}: keeps all data, so it is for data-source = 'stream' alone")
    if config.privacy.hides:
        config = Config.parse({**config.flat(), "report-classes": False})
    return method, config


def _check_privacy(method: Method, config: Config) -> None:
    asked = config.privacy
    if method.is_mean or not (asked.hides or asked.statistics == "local"):
        return
    key = f"dp = {asked.dp!r}" if asked.dp != "none" else "secagg = true" if asked.secagg else "statistics = 'local'"
    means = ", ".join(sorted(name for name, each in METHODS.items() if each.is_mean))
    raise ConfigError(f"{key} with method = {config.method!r}: its server does not take a mean alone; one of {means}")
