"""The configuration: one frozen tree, parsed once from Flower's flat run config.

The common sections are declared in :mod:`fedkace_flwr.sections`, those of the methods in
:mod:`fedkace_flwr.methods`. The registry adds the methods' sections with :func:`register_section`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.keys import Affects, Key, Scalar, checked, default_of, kebab, key, keys_of
from fedkace_flwr.sections import (
    AggregationConfig,
    AnswerConfig,
    AttackConfig,
    BufferConfig,
    DataConfig,
    ModelConfig,
    PrivacyConfig,
    RunConfig,
    StreamConfig,
    TrainingConfig,
)

LARGEST_SUM = 1000
"""Largest number of clients whose masked updates can be summed in 32 bits."""

Section = TypeVar("Section")

_METHOD_SECTIONS: dict[type, set[str]] = {}
"""The methods' sections, each with the names of the methods that read it."""

_ADDED_SECTIONS: set[type] = set()
"""Those of other packages' methods; a configuration holds them only with such a method."""

_FORMER: Mapping[str, Mapping[object, Mapping[str, object]]] = {
    "tensorboard": {True: {"tracker": "tensorboard"}, False: {}},
}
"""Keys of version 1.0 that are now called otherwise: by their values, the keys and values that replace them."""

_BOUNDS_OFF = {
    "clip-bound": 0,
    "direction-bound": -1,
    "statistics-bound": -1,
    "retention-bound": 0,
    "norm-bound": 0,
}
"""Keys of earlier versions that ``defence`` replaces, with the values by which each was off."""

_added_by: list[Callable[[str | None], None]] = []
"""What declares the keys of other packages' methods: at most one."""


def on_parsing(declare: Callable[[str | None], None]) -> None:
    """Set what declares the keys of other packages' methods.

    Parameters
    ----------
    declare : callable
        Called with the name of a method before a configuration with it is parsed, and with None where a key is unknown
        that any method might declare. Raises ConfigError if the method named cannot be loaded; an unknown one is left
        alone.
    """
    _added_by[:] = [declare]


def _declare_added(method: str | None) -> None:
    for declare in _added_by:
        declare(method)


def renewed(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return values with the keys of earlier versions replaced by what they are called now; those given as well win.

    Where bounds of updates were given, ``defence`` is on, unless all were off or had no effect, or there was one alone.
    """
    former = [name for name in values if name in _FORMER and values[name] in _FORMER[name]]
    found = {key: value for name in former for key, value in _FORMER[name][values[name]].items()}
    if bounds := _BOUNDS_OFF.keys() & values.keys():
        hidden = values.get("secagg") is True or values.get("dp") == "central"  # where bounds had no effect
        # The first version had norm-bound alone, which none of its kept runs met.
        alone = bounds == {"norm-bound"}
        off = hidden or alone or all(values[name] == _BOUNDS_OFF[name] for name in bounds)
        found["defence"] = "off" if off else "on"
    return {**found, **{name: value for name, value in values.items() if name not in {*former, *bounds}}}


def register_section(section: type, method: str, *, added: bool = False) -> None:
    """Add a method's keys to the configuration.

    A section may have a method ``check(config)`` that raises ConfigError if its keys contradict others.

    Parameters
    ----------
    section : type
        A frozen dataclass of keys; several methods may share it.
    method : str
        Name of a method that reads it.
    added : bool
        Whether it is the section of another package's method.

    Raises
    ------
    ValueError
        One of its keys already exists.
    """
    if section in _METHOD_SECTIONS:
        _METHOD_SECTIONS[section].add(method)
        return
    check_section(section)
    _METHOD_SECTIONS[section] = {method}
    if added:
        _ADDED_SECTIONS.add(section)


def check_section(section: type) -> None:
    """Check that a method's section can be registered.

    Raises
    ------
    ValueError
        One of its keys already exists in another section.
    """
    known = {name for other, name, _ in all_keys() if other is not section}
    for name in keys_of(section):
        if kebab(name) in known:
            raise ValueError(f"{section.__name__}: key {kebab(name)} is already declared")


def all_keys(*, added: bool = True) -> Iterator[tuple[type, str, Key]]:
    """Yield the section, kebab-case name and declaration of every key; the configuration itself counts as a section.

    Without ``added``, keys of other packages' methods are left out.
    """
    sections: list[type] = [Config, *_SECTIONS.values(), *_METHOD_SECTIONS]
    for section in sections:
        if section in _ADDED_SECTIONS and not added:
            continue
        for name, declared in keys_of(section).items():
            yield section, kebab(name), declared


def keys_affecting(*what: Affects) -> frozenset[str]:
    """Return the names of the keys that affect any of these."""
    return frozenset(name for _, name, declared in all_keys() if declared.affects in what)


def keys_of_other_methods(method: str) -> frozenset[str]:
    """Return the names of the keys that only other methods read."""
    foreign = (section for section, methods in _METHOD_SECTIONS.items() if method not in methods)
    return frozenset(kebab(name) for section in foreign for name in keys_of(section))


def readers_of(key: str) -> frozenset[str]:
    """Return the names of the methods that read a key of methods; empty for a key of all."""
    found = (methods for section, methods in _METHOD_SECTIONS.items() if key in map(kebab, keys_of(section)))
    return frozenset(next(found, ()))


def declared_keys(wanted: Iterable[str]) -> dict[str, tuple[type, Key]]:
    """Return section and declaration of every key by name, those of other packages' methods too if one is wanted."""
    keys = {name: (section, declared) for section, name, declared in all_keys()}
    if not keys.keys() >= set(wanted):
        _declare_added(None)
        keys = {name: (section, declared) for section, name, declared in all_keys()}
    return keys


def check_value(name: str, value: object) -> None:
    """Check one key by itself: whether it exists, and whether the value has its type and is in its range.

    Raises
    ------
    ConfigError
        It fails.
    """
    if name in _BOUNDS_OFF:
        raise ConfigError(f"{name} = {value!r:.100}: is replaced by defence, which must be on or off")
    values = renewed({name: value})
    _check_names(values)
    for each in values:
        section, declared = declared_keys(values)[each]
        checked(each, values[each], declared, default_of(section, each.replace("-", "_")))


def _check_names(values: Mapping[str, object]) -> None:
    known = declared_keys(values)
    for name in values:
        if name not in known:
            hint = closest(str(name), known) or "; see docs/configuration.md for the keys"
            raise ConfigError(f"unknown key {name:.100} = {values[name]!r:.100}{hint}")


def path_keys() -> frozenset[str]:
    """Return the names of the keys whose values are folders or files: by convention, those that end in ``-dir`` or ``-file``."""
    return folder_keys() | {name for _, name, _ in all_keys() if name.endswith("-file")}


def folder_keys() -> frozenset[str]:
    """Return the names of the keys whose values are folders: by convention, those that end in ``-dir``."""
    return frozenset(name for _, name, _ in all_keys() if name.endswith("-dir"))


@dataclass(frozen=True)
class Config:
    """The whole configuration.

    Attributes
    ----------
    method : str
        Name of the method; see :mod:`fedkace_flwr.registry`.
    data, stream, model, training, buffer, answers, privacy, aggregation, attack, run
        The sections.
    methods : tuple
        The methods' sections in which a key differs from its default; :meth:`of` reads any section.
    """

    method: str = key(
        "fedkace",
        "Method, one of the names in `fedkace_flwr/registry.py`, or the name of one that another package adds (docs/extend.md).",
    )
    data: DataConfig = field(default_factory=DataConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    run: RunConfig = field(default_factory=RunConfig)
    methods: tuple[object, ...] = ()

    def of(self, section: type[Section]) -> Section:
        """Return a method's section; its defaults if nothing was set."""
        found = next((each for each in self.methods if type(each) is section), None)
        return found if isinstance(found, section) else section()

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Build the tree from flat kebab-case keys; missing keys take their defaults.

        Raises
        ------
        ConfigError
            A key is unknown, a value has the wrong type or is out of range, or two keys contradict each other.
        """
        values = renewed(values)
        if isinstance(method := values.get("method"), str):
            _declare_added(method)
        _check_names(values)

        def chosen(section: type) -> dict[str, Scalar]:
            return {
                name: checked(kebab(name), values[kebab(name)], declared, default_of(section, name))
                for name, declared in keys_of(section).items()
                if kebab(name) in values
            }

        parts = {name: section(**chosen(section)) for name, section in _SECTIONS.items()}
        methods = [section(**chosen(section)) for section in _METHOD_SECTIONS]
        changed = tuple(section for section in methods if section != type(section)())
        config = cls(**chosen(cls), **parts, methods=changed)  # type: ignore[arg-type]
        config._check_together()
        for section in methods:
            if (check := getattr(section, "check", None)) is not None:
                check(config)
        return config

    def flat(self) -> dict[str, Scalar]:
        """Return every key with its value, in order of declaration; without those of other packages' other methods."""
        values: dict[str, Scalar] = {"method": self.method}
        read = [kind for kind, by in _METHOD_SECTIONS.items() if kind not in _ADDED_SECTIONS or self.method in by]
        sections = [getattr(self, name) for name in _SECTIONS] + [self.of(kind) for kind in read]
        for section in sections:
            values |= {kebab(name): getattr(section, name) for name in keys_of(type(section))}
        return values

    @property
    def unread(self) -> dict[str, Scalar]:
        """The keys that only other methods read and whose values differ from their defaults, with the values."""
        foreign = keys_of_other_methods(self.method)
        changed, defaults = self.flat(), type(self)().flat()
        return {name: value for name, value in changed.items() if name in foreign and value != defaults[name]}

    @property
    def largest_chunk(self) -> int:
        """Largest number of samples in a client's chunk."""
        return self.data.inbox_bound if self.data.data_source == "inbox" else self.stream.largest_chunk

    @property
    def mean_chunk(self) -> int:
        """Number of samples in a chunk, averaged over clients; of an inbox, the largest."""
        return self.data.inbox_bound if self.data.data_source == "inbox" else self.stream.mean_chunk(self.run.seed)

    def keeps_models(self, *, on_device: bool) -> bool:
        """Whether a client stores the models that it answers with: ``keep-models``, with ``auto`` resolved.

        Parameters
        ----------
        on_device : bool
            Whether the client's node has a folder of its own for state or models, as a device has.
        """
        wanted = on_device or self.data.data_source == "inbox"
        return {"always": True, "never": False}.get(self.run.keep_models, wanted)

    @property
    def _trained_in_words(self) -> str:
        """The number of clients that train in a round, by the keys that it follows from."""
        stream = self.stream
        if stream.participants_per_round == stream.clients:
            return f"clients = {stream.clients}"
        return (
            f"clients = {stream.clients} and fraction-train = {stream.fraction_train:g}, "
            f"{stream.participants_per_round} a round"
        )

    def _check_together(self) -> None:
        if self.data.data_source == "inbox":
            self._check_inbox()
        self._check_aggregation()
        if self.privacy.secagg and not 3 <= self.stream.participants_per_round <= LARGEST_SUM:
            raise ConfigError(
                f"{self._trained_in_words}: with secagg = true, must be between 3 (with two clients, each learns "
                f"the other's update from the sum) and {LARGEST_SUM} (more would overflow 32 bits)"
            )
        stream = self.stream
        if stream.overlap > stream.window:
            raise ConfigError(f"overlap = {stream.overlap}: must be between 0 and window = {stream.window}")
        if stream.window * stream.samples_per_class < 2:
            raise ConfigError(
                f"samples-per-class = {stream.samples_per_class} with window = {stream.window}: "
                "a chunk needs at least 2 samples, for batch normalisation"
            )
        if 0 < self.data.num_classes < stream.window:
            raise ConfigError(f"window = {stream.window}: must be at most num-classes = {self.data.num_classes}")
        if self.buffer.capacity < self.data.num_classes:
            raise ConfigError(
                f"capacity = {self.buffer.capacity}: must be at least the number of classes, {self.data.num_classes}"
            )

    def _check_aggregation(self) -> None:
        rule, clients = self.aggregation.aggregation_rule, self.stream.clients
        trained = self.stream.participants_per_round
        if rule != "mean" and self.privacy.secagg:
            raise ConfigError(
                f"aggregation-rule = {rule!r} with secagg = true: the server learns only a sum; must be 'mean'"
            )
        if rule != "mean" and self.privacy.dp == "central":
            raise ConfigError(
                f"aggregation-rule = {rule!r} with dp = 'central': the noise is calibrated for a mean; must be 'mean'"
            )
        self._check_defence_has_effect()
        if self.aggregation.byzantine_clients > (most := (trained - 1) // 2):
            raise ConfigError(
                f"byzantine-clients = {self.aggregation.byzantine_clients} with {self._trained_in_words}: must be less "
                f"than half of the clients, at most {most}"
            )
        if self.attack.attack != "none" and self.attack.hostile_clients > clients:
            raise ConfigError(f"hostile-clients = {self.attack.hostile_clients}: must be at most clients = {clients}")
        if self.attack.attack != "none" and self.data.data_source == "inbox":
            raise ConfigError(
                f"attack = {self.attack.attack!r}: for simulations alone; with data-source = 'inbox', must be 'none'"
            )

    def _check_defence_has_effect(self) -> None:
        if self.privacy.secagg:
            reason = "secagg = true: the server sees no single update"
        elif self.privacy.dp == "central":
            reason = "dp = 'central': the server scales updates down to dp-clip and does not compare them"
        else:
            return
        if self.aggregation.defence == "on":
            raise ConfigError(f"defence = 'on' with {reason}; must be 'off'")

    def _check_inbox(self) -> None:
        names = self.data.classes()
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise ConfigError(
                f"class-names = {self.data.class_names!r}: with data-source = 'inbox', must be at least two different "
                "names, separated by commas"
            )
        if self.data.image_size < 1:
            raise ConfigError(f"image-size = {self.data.image_size}: with data-source = 'inbox', must be at least 1")
        if self.buffer.capacity < len(names):
            raise ConfigError(
                f"capacity = {self.buffer.capacity}: must be at least the number of classes, {len(names)}"
            )
        if self.privacy.dp_seeded:
            raise ConfigError("dp-seeded = true: for simulation alone; data-source = 'inbox' requires unseeded noise")


_SECTIONS: dict[str, type[Any]] = {
    "data": DataConfig,
    "stream": StreamConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "buffer": BufferConfig,
    "answers": AnswerConfig,
    "privacy": PrivacyConfig,
    "aggregation": AggregationConfig,
    "attack": AttackConfig,
    "run": RunConfig,
}
