"""What a run's method makes of the configuration: its preset applied, and what it does not support refused."""

from collections.abc import Iterable, Mapping

from flwr.app import MessageType

from fedkace_flwr import plugins
from fedkace_flwr.config import Config, add_method
from fedkace_flwr.data.readers.catalogue import DATASETS, are_arrays, form_asked, may_be_mirrored
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.keys import Scalar
from fedkace_flwr.messaging.metrics import check_metrics
from fedkace_flwr.networks.catalogue import NETWORKS, facts_of
from fedkace_flwr.networks.network import Blueprint
from fedkace_flwr.privacy.hostile import attack_of
from fedkace_flwr.registry import METHODS, OWN_METHODS, Method
from fedkace_flwr.sections.runs import TIMM


def find_method(name: str) -> Method:
    """Look a method up, and import it if it is another package's.

    Raises
    ------
    ConfigError
        There is no such method, or it cannot be imported.
    """
    add_method(name)
    if name not in METHODS:
        known = known_names()["method"]
        raise ConfigError(f"method = {name!r}: must be one of {', '.join(known)}{closest(name, known)}")
    if name not in OWN_METHODS:
        try:
            check_metrics(METHODS[name].metrics)
        except ValueError as fault:
            del METHODS[name]
            raise plugins.broken("method", name, f"cannot be added ({fault})") from fault
    return METHODS[name]


def known_names() -> dict[str, list[str]]:
    """Return the names of all methods, data sets and networks, other packages' among them, by the key that takes them."""
    return {
        "method": sorted({*METHODS, *plugins.found("method")}),
        "dataset": [*DATASETS, "inbox", *plugins.found("dataset")],
        "network": [*NETWORKS, TIMM.rstrip(":"), *plugins.found("network")],
    }


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
    used = _with_preset(method, config)
    _check_preset(method, given, used.flat(), [key for key in method.preset if given[key] != defaults[key]])
    config = used
    _check_arrays(config)
    _check_privacy(method, config)
    _check_aggregation(method, config)
    _check_attack(method, config)
    _check_server_optimiser(method, config)
    _check_gate(method, config)
    _check_trainable(config)
    if method.needs_stream and config.data.arrives:
        raise ConfigError(
            f"method = {config.method!r}: keeps all data; works with a stream only, not with dataset = 'inbox'"
        )
    if method.needs_stream and config.data.grows:
        raise ConfigError(
            f"method = {config.method!r}: trains on the whole stream at once, where no class waits for a name; works "
            "with classes = 'fixed' only"
        )
    if not config.data.arrives:
        _check_labels(method, config)
    if config.privacy.hides:
        config = config.replaced({"report-classes": False})
    return method, config


def _check_arrays(config: Config) -> None:
    if not are_arrays(config.data):
        return
    of_pictures = {"image-size": 0, "mirroring": "auto", "augment": "none", "test-time-augmentation": "none"}
    values = config.flat()
    for key, must in of_pictures.items():
        if values[key] != must and not (key == "mirroring" and values[key] == "never"):
            raise ConfigError(
                f"{key} = {values[key]!r}: with dataset = {config.data.dataset!r}, whose samples are no pictures, must be "
                f"{must!r}"
            )


def _check_labels(method: Method, config: Config) -> None:
    delay, share, rounds = config.stream.label_delay, config.stream.label_share, config.stream.rounds
    if delay >= rounds:
        raise ConfigError(f"label-delay = {delay}: must be less than rounds = {rounds}, or no label would come")
    if method.needs_stream and (delay or share < 1):
        told, wanted = (f"label-delay = {delay}", 0) if delay else (f"label-share = {share:g}", 1)
        raise ConfigError(
            f"{told} with method = {config.method!r}, which trains on the whole stream at once: must be {wanted}"
        )


def check_rounds(config: Config, planned: int, done: int) -> None:
    """Check that a run with so many finished rounds, of ``planned`` ones, goes on to the configuration's number exactly.

    Raises
    ------
    ConfigError
        It has done more, or a round that is done, or that clients may have begun, would be another with that number.
    """
    asked = config.stream.rounds
    if 0 < asked < done:
        raise ConfigError(f"rounds = {asked}: the run has done {done}; must be at least that")
    if asked == planned:
        return
    begun = min(done + 1, planned or done + 1, asked or done + 1)
    reason = "" if config.data.arrives else config.stream.why_not_longer
    if reason := reason or find_method(config.method).strategy(config).why_not_longer(planned, begun):
        raise ConfigError(
            f"rounds = {asked}: the run was begun with {planned}, and {reason}; resume it with that, or choose another "
            "run-name"
        )


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
    _check_preset(method, config.flat(), _with_preset(method, config).flat(), chosen)


def _check_preset(
    method: Method, given: Mapping[str, Scalar], used: Mapping[str, Scalar], chosen: Iterable[str]
) -> None:
    for key in chosen:
        if key in method.preset and given[key] not in (method.preset[key], used[key]):
            raise ConfigError(
                f"{key} = {given[key]!r}: method = {given['method']!r} sets it to {method.preset[key]!r}, so it would "
                "have no effect; leave it out or choose another method"
            )


def _with_preset(method: Method, config: Config) -> Config:
    """The configuration with the method's preset, and with ``auto`` resolved."""
    config, mirrors = config.replaced(method.preset), may_be_mirrored(config.data)
    resolved: dict[str, Scalar] = {}
    if config.training.augment == "auto":
        resolved["augment"] = "flip-shift" if mirrors else "none"
    if config.answers.test_time_augmentation == "auto":
        resolved["test-time-augmentation"] = "mirrored" if mirrors else "none"
    return config.replaced(resolved) if resolved else config


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
    given = "pretrained = true" if model.pretrained else f"weights-file = {model.weights_file!r:.200}"
    starts = model.pretrained or bool(model.weights_file)
    if model.network == "resnet18" and not (method.splits and starts):
        return
    half = facts_of(model.network, Blueprint(1, form_asked(config.data).shape, model.width, model.stem)).half
    if method.splits and half is None:
        raise ConfigError(
            f"network = {model.network!r} with method = {config.method!r}, which trains the halves of a network apart: "
            f"must be one that can be split, as {', '.join(NETWORKS)}"
        )
    if method.splits and starts:
        must = "false" if model.pretrained else "empty"
        raise ConfigError(f"{given} with method = {config.method!r}, which sends no weights: must be {must}")


def _check_privacy(method: Method, config: Config) -> None:
    asked = config.privacy
    if method.is_mean or not (asked.hides or asked.batchnorm_statistics == "local"):
        return
    key = (
        f"dp = {asked.dp!r}"
        if asked.dp != "none"
        else "secagg = true"
        if asked.secagg
        else "batchnorm-statistics = 'local'"
    )
    means = ", ".join(sorted(name for name, each in METHODS.items() if each.is_mean))
    raise ConfigError(
        f"{key} with method = {config.method!r}: its server needs more than the mean of the models; must be one of {means}"
    )


def _check_aggregation(method: Method, config: Config) -> None:
    rule = config.aggregation.aggregation
    if rule != "mean" and not method.strategy.aggregates:
        raise ConfigError(
            f"aggregation = {rule!r} with method = {config.method!r}, whose server does not merge models by this key; must be "
            "'mean'"
        )
    if config.aggregation.defence == "on" and (reason := method.strategy.undefended):
        raise ConfigError(f"defence = 'on' with method = {config.method!r}: {reason}; must be 'off'")


def _check_server_optimiser(method: Method, config: Config) -> None:
    wanted, rule = config.aggregation.server_optimiser, method.strategy
    if wanted == "none":
        return
    if reason := rule(config).lacks_global_model() or ("" if rule.aggregates else "its server takes no plain mean"):
        raise ConfigError(f"server-optimiser = {wanted!r} with method = {config.method!r}: {reason}; must be 'none'")


def _check_trainable(config: Config) -> None:
    model = config.model
    if model.trainable == "output" and model.output_layer != "learned":
        raise ConfigError(
            f"trainable = 'output' with method = {config.method!r} and output-layer = {model.output_layer!r}, which is "
            "fixed: nothing is left to train; must be 'norm', 'lora' or 'all'"
        )


def _check_gate(method: Method, config: Config) -> None:
    if config.run.gate == "off":
        return
    if reason := method.strategy(config).lacks_global_model():
        raise ConfigError(f"gate = 'hold' with method = {config.method!r}: {reason}; must be 'off'")
    if config.privacy.dp != "none":
        raise ConfigError(
            f"gate = 'hold' with dp = {config.privacy.dp!r}: how many samples a model answers rightly would leave each "
            "client without noise; must be 'off'"
        )


def _check_attack(method: Method, config: Config) -> None:
    if (attack := attack_of(config)) is not None:
        # A method that needs the stream draws its samples itself.
        sends_models = method.strategy.train_action == MessageType.TRAIN and method.strategy.takes_models
        attack.check(sends_models=sends_models, trains_on_chunks=not method.needs_stream)
