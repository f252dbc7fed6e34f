"""The registry of methods: everything that the rest of the program needs to know about each of them."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flwr.app import MessageType

from clients.base import ClientRule
from clients.centralized import CentralizedClient
from clients.dcfcl import DcfclClient
from clients.derpp import DerppClient
from clients.er import BalancedReplayClient, ReplayClient
from clients.fedcbdr import FedCbdrClient
from clients.fedkace import FedKaceClient
from clients.fedprox import FedProxClient
from clients.flwf import FlwfClient
from clients.ofcl import OfclClient
from clients.refed import RefedClient
from clients.tfcl import TfclClient
from fedkace_flwr import plugins
from fedkace_flwr.config import Config, check_section, on_parsing, register_section
from fedkace_flwr.data.readers.catalogue import DATASETS, image_size_of, may_be_mirrored
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.keys import Scalar, kebab, keys_of
from fedkace_flwr.messaging.metrics import check_metrics, register_metrics
from fedkace_flwr.methods import centralized, fedcbdr, ofcl, tfcl
from fedkace_flwr.methods.centralized import CentralizedKeys
from fedkace_flwr.methods.dcfcl import DcfclKeys
from fedkace_flwr.methods.derpp import DerppKeys
from fedkace_flwr.methods.fedcbdr import FedcbdrKeys
from fedkace_flwr.methods.fedkace import FedKaceKeys
from fedkace_flwr.methods.fedprox import FedProxKeys
from fedkace_flwr.methods.flwf import FlwfKeys
from fedkace_flwr.methods.metric import Metric
from fedkace_flwr.methods.ofcl import OfclKeys
from fedkace_flwr.methods.refed import RefedKeys
from fedkace_flwr.methods.tfcl import TfclKeys
from fedkace_flwr.networks.catalogue import NETWORKS, facts_of
from fedkace_flwr.networks.network import Blueprint
from fedkace_flwr.privacy.attacks import check_attack
from fedkace_flwr.training.batches import samples_in_epoch
from strategies.base import ServerRule
from strategies.centralized import Centralized
from strategies.dcfcl import Dcfcl
from strategies.fedavg import FedAvg
from strategies.fedcbdr import FedCbdr
from strategies.fedkace import FedKace
from strategies.ofcl import Ofcl
from strategies.tfcl import Tfcl

Role = Literal["method", "rival", "ablation", "reference"]
"""The role of a method in a comparison: the project's own method, one that it is compared with (rival), a variant of it
with a part switched off (ablation), or the reference against which regret is measured."""

Samples = Callable[[Config, int], int]
"""Computes the samples in an epoch of a client, on average over clients, from the configuration and the round (from 1)."""


def chunk_alone(config: Config, round_number: int) -> int:
    """Count the samples of an epoch without a buffer."""
    return config.mean_chunk


def chunk_and_buffer(config: Config, round_number: int) -> int:
    """Count the samples of an epoch over chunk and buffer, which fills up to ``capacity``."""
    held = min(config.buffer.capacity, (round_number - 1) * config.mean_chunk)
    return samples_in_epoch(config.training.batching, config.mean_chunk, held)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a client receives and sends in a round without failures, as formulas over symbols.

    ``docs/methods.md`` explains the symbols. By default, both messages of a round carry a model, and one reply does.
    """

    down: str = "2*(S + c)"
    up: str = "S + R"


@dataclass(frozen=True)
class Method:
    """The registry entry of a method.

    Attributes
    ----------
    strategy, client : type
        Classes with the hooks of the server half and of the client half.
    label : str
        Name in reports; if empty, the name under which it is registered.
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
        Whether a client starts with its local model and may go over to the global one, unless ``inference`` says
        otherwise.
    splits : bool
        Whether it trains the halves of the network apart, which not every network permits, and without sending weights.
    needs_stream : bool
        Whether a client rereads chunks of earlier rounds, which only a simulated stream can provide.
    samples : callable
        Computes the samples in one epoch of a client's training, for estimates.
    tests : int
        Largest number of models that a client tests in a round if no key asks for more, for estimates.
    traffic : Traffic
        Bytes that a client receives and sends in a round.
    """

    strategy: type[ServerRule]
    client: type[ClientRule]
    label: str = ""
    role: Role = "rival"
    preset: Mapping[str, Scalar] = field(default_factory=dict)
    keys: tuple[type, ...] = ()
    metrics: tuple[Metric, ...] = ()
    actions: tuple[str, ...] = ()
    sends_labels: bool = False
    is_mean: bool = False
    switches: bool = False
    splits: bool = False
    needs_stream: bool = False
    samples: Samples = chunk_and_buffer
    tests: int = 1
    traffic: Traffic = Traffic()


_FEDKACE = Method(
    FedKace, FedKaceClient, "FedKACE", "method", keys=(FedKaceKeys,), is_mean=True, switches=True, tests=2
)


def _ablation(label: str, **changed: Any) -> Method:
    """Return FedKACE with some keys preset."""
    return replace(_FEDKACE, label=label, role="ablation", **changed)


FEDFRAME: dict[str, Scalar] = {
    "output-layer": "simplex",
    "augment": "auto",
    "logit-adjustment": 1.0,
    "recalibrate": True,
    "classifier": "fading",
    "inference": "prequential",
    "views": "auto",
}
"""The parts that make plain replay from a balanced buffer FedFrame (docs/fedframe.md)."""

METHODS: dict[str, Method] = {
    "fedkace": _FEDKACE,
    "fedavg": Method(FedAvg, ClientRule, "FedAVG", is_mean=True, samples=chunk_alone),
    "fedcbdr": Method(
        FedCbdr,
        FedCbdrClient,
        "FedCBDR",
        keys=(FedcbdrKeys,),
        metrics=fedcbdr.METRICS,
        actions=(fedcbdr.FEATURES_QUERY, fedcbdr.SCORES_QUERY),
        sends_labels=True,
        traffic=Traffic(
            "2*(S + c) + (m > M)*((S + c) + (8*m*r + 132 + c) + (8*k + 137))",
            "S + R + (m > M)*((8*m*F + 136) + (1 + balanced)*(8*m + 134))",
        ),
    ),
    "ofcl": Method(Ofcl, OfclClient, "OFCL", keys=(OfclKeys,), metrics=ofcl.METRICS, samples=ofcl.samples),
    "refed": Method(ServerRule, RefedClient, "Re-Fed", keys=(RefedKeys,), is_mean=True),
    "tfcl": Method(
        Tfcl,
        TfclClient,
        "TFCL",
        keys=(TfclKeys,),
        actions=(tfcl.HEAD_ACTION, tfcl.TAIL_ACTION),
        sends_labels=True,
        splits=True,
        samples=chunk_alone,
        traffic=Traffic("3*c + (4*n*C + 134)", "(4*n*A + 136) + (4*n*C + 134) + (8*n + 134) + (C + 132) + R"),
    ),
    "dcfcl": Method(Dcfcl, DcfclClient, "DCFCL", keys=(DcfclKeys,), samples=chunk_alone),
    "er": Method(ServerRule, ReplayClient, "ER", is_mean=True),
    "er-balanced": Method(ServerRule, BalancedReplayClient, "balanced ER", is_mean=True),
    "fedframe": Method(ServerRule, BalancedReplayClient, "FedFrame", "method", preset=FEDFRAME, is_mean=True),
    "derpp": Method(ServerRule, DerppClient, "DER++", keys=(DerppKeys,), is_mean=True),
    "fedprox": Method(ServerRule, FedProxClient, "FedProx", keys=(FedProxKeys,), is_mean=True, samples=chunk_alone),
    "flwf": Method(ServerRule, FlwfClient, "FLwF", keys=(FlwfKeys,), is_mean=True, samples=chunk_alone),
    "lkc": _ablation("LKC", preset={"aggregation": "none"}, is_mean=False),
    "as1": _ablation("AS1", preset={"patience": 1}),
    "as2": _ablation("AS2", preset={"inference": "global"}),
    "as3": _ablation("AS3", preset={"inference": "local"}),
    "as4": _ablation("AS4", preset={"replay-weight": "one"}),
    "as5": _ablation("AS5", preset={"replay-gradient": "full"}),
    "as6": _ablation("AS6", preset={"selection": "information"}),
    "as7": _ablation("AS7", preset={"selection": "random"}),
    "as8": _ablation("AS8", preset={"replay-weight": "one", "selection": "random"}),
    "centralized": Method(
        Centralized,
        CentralizedClient,
        "Centralized",
        "reference",
        keys=(CentralizedKeys,),
        needs_stream=True,
        samples=centralized.samples,
        traffic=Traffic("c", "R"),
    ),
}
"""All methods; reports list the methods of each role in this order. Other packages' methods are added when first named."""

OWN_METHODS = tuple(METHODS)
"""The names of the methods that come with the package."""

for _name, _method in METHODS.items():
    for _section in _method.keys:
        register_section(_section, _name)
    register_metrics(_method.metrics)


def find_method(name: str) -> Method:
    """Look a method up, and import it if it is another package's.

    Raises
    ------
    ConfigError
        There is no such method, or it cannot be imported.
    """
    _add(name)
    if name not in METHODS:
        known = known_names()["method"]
        raise ConfigError(f"method = {name!r}: must be one of {', '.join(known)}{closest(name, known)}")
    return METHODS[name]


def known_names() -> dict[str, list[str]]:
    """Return the names of all methods, data sets and networks, other packages' among them, by the key that takes them."""
    return {
        "method": sorted({*METHODS, *plugins.found("method")}),
        "dataset": [*DATASETS, *plugins.found("dataset")],
        "network": [*NETWORKS, *plugins.found("network")],
    }


def _add(name: str) -> None:
    """Add a method of another package, with its keys and metrics; nothing happens if there is none of this name."""
    if name in METHODS or (method := plugins.loaded("method", name)) is None:
        return
    if not isinstance(method, Method):
        raise plugins.broken("method", name, "must be a fedkace_flwr.registry.Method")
    try:
        keys = [kebab(each) for section in method.keys for each in keys_of(section)]
        if len(set(keys)) < len(keys):
            raise ValueError("it declares a key twice")
        for section in method.keys:
            check_section(section)
        check_metrics(method.metrics)
        if unknown := set(method.preset).difference(Config().flat(), keys):
            raise ValueError(f"its preset names unknown keys, {', '.join(sorted(unknown))}")
        register_metrics(method.metrics)
    except Exception as fault:  # another package's declarations may be of any kind
        raise plugins.broken("method", name, f"cannot be added ({fault})") from fault
    for section in method.keys:
        register_section(section, name, added=True)
    METHODS[name] = method


def _declare_added(name: str | None) -> None:
    for each in plugins.found("method") if name is None else [name]:
        with suppress(*([ConfigError] if name is None else [])):  # a broken one matters only where it is named
            _add(each)


on_parsing(_declare_added)


def configured(config: Config) -> tuple[Method, Config]:
    """Return the method that a configuration names, and the configuration with the method's preset applied.

    With differential privacy or secure aggregation, class histograms are not reported: they would reveal what is
    hidden in the models.

    Raises
    ------
    ConfigError
        There is no such method, it sets another value for a key that is set, or it does not support the keys of
        privacy, aggregation or attacks that are set.
    """
    method, defaults, given = find_method(config.method), Config().flat(), config.flat()
    check_preset(config, [key for key in method.preset if given[key] != defaults[key]])
    config = _with_preset(method, config)
    _check_privacy(method, config)
    _check_aggregation(method, config)
    _check_attack(method, config)
    if method.needs_stream and config.data.data_source != "stream":
        raise ConfigError(f"method = {config.method!r}: keeps all data; works with data-source = 'stream' only")
    if config.privacy.hides:
        config = Config.parse({**config.flat(), "report-classes": False})
    return method, config


def check_preset(config: Config, chosen: Iterable[str]) -> None:
    """Check that the method's preset does not replace values that somebody has chosen.

    Parameters
    ----------
    config : Config
        As it was given.
    chosen : iterable of str
        Keys.

    Raises
    ------
    ConfigError
        The method sets another value for one of the keys, or there is no such method.
    """
    method = find_method(config.method)
    given, used = config.flat(), _with_preset(method, config).flat()
    for key in chosen:
        if key in method.preset and given[key] not in (method.preset[key], used[key]):
            raise ConfigError(
                f"{key} = {given[key]!r}: method = {config.method!r} sets it to {method.preset[key]!r}, so it would "
                "have no effect; leave it out or choose another method"
            )


def _with_preset(method: Method, config: Config) -> Config:
    """The configuration with the method's preset, and with ``auto`` resolved."""
    values, mirrors = {**config.flat(), **method.preset}, may_be_mirrored(config.data)
    if values["augment"] == "auto":
        values["augment"] = "flip-shift" if mirrors else "none"
    if values["views"] == "auto":
        values["views"] = "mirrored" if mirrors else "one"
    return Config.parse(values)


def warn_of_replacements(config: Config) -> None:
    """Log a warning for each name of this package that the run uses and that another package would like to replace."""
    plugins.warn_of_replacements("method", config.method, OWN_METHODS)
    plugins.warn_of_replacements("network", config.model.network, NETWORKS)
    plugins.warn_of_replacements("dataset", config.data.dataset, DATASETS)


def check_network(method: Method, config: Config) -> None:
    """Check that a method works with the network that a configuration names; the network is built for it.

    Raises
    ------
    ConfigError
        There is no such network, or it cannot be built or used so.
    """
    model = config.model
    if model.network == "resnet18" and not (method.splits and model.weights_file):
        return
    half = facts_of(model.network, Blueprint(1, image_size_of(config.data), model.width, model.stem)).half
    if method.splits and half is None:
        raise ConfigError(
            f"network = {model.network!r} with method = {config.method!r}, which trains the halves of a network apart: "
            f"must be one that can be split, as {', '.join(NETWORKS)}"
        )
    if method.splits and model.weights_file:
        raise ConfigError(
            f"weights-file = {model.weights_file!r:.200} with method = {config.method!r}, which sends no weights: must be empty"
        )


def _check_privacy(method: Method, config: Config) -> None:
    asked = config.privacy
    if method.is_mean or not (asked.hides or asked.statistics == "local"):
        return
    key = f"dp = {asked.dp!r}" if asked.dp != "none" else "secagg = true" if asked.secagg else "statistics = 'local'"
    means = ", ".join(sorted(name for name, each in METHODS.items() if each.is_mean))
    raise ConfigError(
        f"{key} with method = {config.method!r}: its server needs more than the mean of the models; must be one of {means}"
    )


def _check_aggregation(method: Method, config: Config) -> None:
    rule = config.aggregation.aggregation_rule
    if rule != "mean" and (method.splits or method.strategy.train_action is None):
        raise ConfigError(
            f"aggregation-rule = {rule!r} with method = {config.method!r}, whose server aggregates no models; must be "
            "'mean'"
        )


def _check_attack(method: Method, config: Config) -> None:
    sends_models = method.strategy.train_action == MessageType.TRAIN
    # A method that needs the stream draws its samples itself.
    check_attack(config, sends_models=sends_models, trains_on_chunks=not method.needs_stream)
