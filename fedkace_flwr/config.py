"""The configuration: one frozen tree, parsed once from Flower's flat run config.

The common sections are declared in :mod:`fedkace_flwr.sections`, a method's own in the module of its client half.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from fedkace_flwr import former_keys, plugins
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.keys import (
    CLASS_NAME,
    UNLABELLED,
    Affects,
    Key,
    Scalar,
    checked,
    default_of,
    is_class_name,
    kebab,
    key,
    keys_of,
)
from fedkace_flwr.registry import METHODS, OWN_METHODS, of_another_package
from fedkace_flwr.sections import (
    SMALLEST_SUM,
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
from fedkace_flwr.sections.stream import absences

LARGEST_SUM = 1000
"""Largest number of clients whose masked updates can be summed in 32 bits."""

Section = TypeVar("Section")

_OF_DATA_SETS = frozenset({"data-dir", "num-classes", "first-class", "test-per-class", "test-share"})
"""Keys that an inbox ignores, beside those of streams."""

_OF_INBOXES = frozenset(
    {"inbox-bound", "inbox-after", "inbox-shape", "inbox-statistics", "round-interval", "round-samples"}
)


def add_method(name: str) -> None:
    """Put a method of another package, with its keys, into the registry; nothing happens if there is none of this name.

    Raises
    ------
    ConfigError
        It cannot be loaded, one of its keys is declared already, or its preset names an unknown key.
    """
    if name in METHODS or (method := of_another_package(name)) is None:
        return
    try:
        own = [kebab(each) for section in method.keys for each in keys_of(section)]
        known = {each: section for section, each, _ in all_keys()}
        for each, count in Counter(own).items():
            if count > 1 or (each in known and known[each] not in method.keys):
                raise ValueError(f"key {each} is already declared")
        if unknown := set(method.preset).difference(known, own):
            raise ValueError(f"its preset names unknown keys, {', '.join(sorted(unknown))}")
    except Exception as fault:  # another package's declarations may be of any kind
        raise plugins.broken("method", name, f"cannot be added ({fault})") from fault
    METHODS[name] = method


def _add_all_methods() -> None:
    for name in plugins.found("method"):
        with suppress(ConfigError):  # a broken one matters only where it is named
            add_method(name)


def _method_sections(*, added: bool = True) -> dict[type, list[str]]:
    """The methods' sections, each with the names of the methods that read it."""
    sections: dict[type, list[str]] = {}
    for name in METHODS if added else OWN_METHODS:
        for section in METHODS[name].keys:
            sections.setdefault(section, []).append(name)
    return sections


def all_keys(*, added: bool = True) -> Iterator[tuple[type, str, Key]]:
    """Yield the section, kebab-case name and declaration of every key; the configuration itself counts as a section.

    Without ``added``, keys of other packages' methods are left out.
    """
    sections: list[type] = [Config, *_SECTIONS.values(), *_method_sections(added=added)]
    for section in sections:
        for name, declared in keys_of(section).items():
            yield section, kebab(name), declared


def keys_affecting(*what: Affects) -> frozenset[str]:
    """Return the names of the keys that affect any of these."""
    return frozenset(name for _, name, declared in all_keys() if declared.affects in what)


def living_keys() -> frozenset[str]:
    """Return the names of the keys that affect numbers and may change when a run is resumed."""
    return frozenset(name for _, name, declared in all_keys() if declared.living)


def keys_of_other_methods(method: str) -> frozenset[str]:
    """Return the names of the keys that only other methods read."""
    foreign = (section for section, methods in _method_sections().items() if method not in methods)
    return frozenset(kebab(name) for section in foreign for name in keys_of(section))


def readers_of(key: str) -> frozenset[str]:
    """Return the names of the methods that read a key of methods; empty for a key of all."""
    found = (methods for section, methods in _method_sections().items() if key in map(kebab, keys_of(section)))
    return frozenset(next(found, ()))


def declared_keys(wanted: Iterable[str]) -> dict[str, tuple[type, Key]]:
    """Return section and declaration of every key by name, those of other packages' methods too if one is wanted."""
    keys = {name: (section, declared) for section, name, declared in all_keys()}
    if not keys.keys() >= set(wanted):
        _add_all_methods()
        keys = {name: (section, declared) for section, name, declared in all_keys()}
    return keys


def check_value(name: str, value: object) -> None:
    """Check one key by itself: whether it exists, and whether the value has its type and is in its range.

    Raises
    ------
    ConfigError
        It fails.
    """
    _check_names({name: value})
    section, declared = declared_keys([name])[name]
    checked(name, value, declared, default_of(section, name.replace("-", "_")))


def _check_names(values: Mapping[str, object]) -> None:
    known = declared_keys(values)
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown key {name:.100} = {values[name]!r:.100}{hint(name, known)}")


def hint(name: str, known: Iterable[str]) -> str:
    """Return what to say of a name that is no key: what it is called now, which key may be meant, or where to look."""
    return former_keys.told(name) or closest(name, known) or "; see docs/configuration.md for the keys"


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
        "Method, one of those in docs/methods.md, or of another package.",
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
        if isinstance(method := values.get("method"), str):
            add_method(method)
        _check_names(values)
        return cls().replaced(values)

    def replaced(self, values: Mapping[str, object]) -> Self:
        """Return the configuration with other values of some keys, by their present kebab-case names.

        Raises
        ------
        ConfigError
            A value has the wrong type or is out of range, or two keys contradict each other.
        """

        def changed(section: Any) -> Any:
            kind = type(section)
            found = {
                name: checked(kebab(name), values[kebab(name)], declared, default_of(kind, name))
                for name, declared in keys_of(kind).items()
                if kebab(name) in values
            }
            return replace(section, **found)

        parts = {name: changed(getattr(self, name)) for name in _SECTIONS}
        methods = [changed(self.of(kind)) for kind in _method_sections()]
        own = tuple(section for section in methods if section != type(section)())
        config: Self = replace(changed(self), **parts, methods=own)
        config._check_together()
        for section in methods:
            if (check := getattr(section, "check", None)) is not None:
                check(config)
        return config

    def flat(self) -> dict[str, Scalar]:
        """Return every key with its value, in order of declaration; without those of other packages' other methods."""
        values: dict[str, Scalar] = {"method": self.method}
        own = _method_sections(added=False)
        read = [kind for kind, by in _method_sections().items() if kind in own or self.method in by]
        sections = [getattr(self, name) for name in _SECTIONS] + [self.of(kind) for kind in read]
        for section in sections:
            values |= {kebab(name): getattr(section, name) for name in keys_of(type(section))}
        return values

    def effective(self) -> dict[str, Scalar]:
        """Return the keys that this configuration reads, with their values."""
        ignored = self.ignored
        return {name: value for name, value in self.flat().items() if name not in ignored}

    @property
    def unread(self) -> dict[str, Scalar]:
        """The keys that this configuration ignores and whose values differ from their defaults, with the values."""
        changed, defaults, ignored = self.flat(), type(self)().flat(), self.ignored
        return {name: value for name, value in changed.items() if name in ignored and value != defaults[name]}

    @property
    def ignored(self) -> frozenset[str]:
        """The names of the keys that nothing reads: those of other methods, and what data or network do not use."""
        of_streams = {kebab(name) for name in keys_of(StreamConfig)} - {"clients", "rounds", "fraction-train"}
        foreign = keys_of_other_methods(self.method) | (frozenset() if self.data.grows else {"max-classes"})
        foreign |= {"width", "stem"} if self.model.of_timm else frozenset()
        return foreign | (of_streams | _OF_DATA_SETS if self.data.arrives else _OF_INBOXES)

    @property
    def largest_chunk(self) -> int:
        """Largest number of samples in a client's chunk; of a stream with open classes, of all that can have waited."""
        if self.data.arrives:
            return self.data.inbox_bound
        return self.stream.largest_chunk * (self.stream.rounds if self.data.grows else 1)

    @property
    def mean_chunk(self) -> int:
        """Number of samples in a chunk, averaged over clients; of an inbox, the largest."""
        return self.data.inbox_bound if self.data.arrives else self.stream.mean_chunk(self.run.seed)

    @property
    def chunks(self) -> str:
        """What a client's chunks hold, in words; empty for an inbox, of which nobody knows."""
        stream = self.stream
        if self.data.arrives:
            return ""
        if stream.kind == "dirichlet":
            return f"dirichlet stream, chunks of {stream.largest_chunk}"
        kind = "" if stream.kind == "windows" else f"{stream.kind} stream, "
        return f"{kind}window {stream.window}, overlap {stream.overlap}"

    def keeps_models(self, *, on_device: bool) -> bool:
        """Whether a client stores the models that it answers with: ``keep-models``, with ``auto`` resolved.

        Parameters
        ----------
        on_device : bool
            Whether the client's node has a folder of its own for state or models, as a device has.
        """
        wanted = on_device or self.data.arrives
        return {"always": True, "never": False}.get(self.run.keep_models, wanted)

    @property
    def keeps_memory(self) -> bool:
        """Whether a client begins with what it has in its buffer from an earlier run: ``memory``, with ``auto`` resolved."""
        return {"keep": True, "fresh": False}.get(self.run.memory, self.data.arrives)

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
        if self.data.arrives:
            self._check_inbox()
        if self.data.grows:
            self._check_open_classes()
        self._check_aggregation()
        if self.privacy.secagg and not SMALLEST_SUM <= self.stream.participants_per_round <= LARGEST_SUM:
            raise ConfigError(
                f"{self._trained_in_words}: with secagg = true, must be between {SMALLEST_SUM} (with two clients, each learns "
                f"the other's update from the sum) and {LARGEST_SUM} (more would overflow 32 bits)"
            )
        stream = self.stream
        if stream.rounds == 0 and not self.data.arrives:
            raise ConfigError(
                "rounds = 0: only with dataset = 'inbox'; the streams of data sets end, must be at least 1"
            )
        self._check_absences()
        if stream.overlap > stream.window:
            raise ConfigError(f"overlap = {stream.overlap}: must be between 0 and window = {stream.window}")
        if stream.window * stream.samples_per_class < 2:
            raise ConfigError(
                f"samples-per-class = {stream.samples_per_class} with window = {stream.window}: "
                "a chunk needs at least 2 samples, for batch normalisation"
            )
        if self.model.pretrained and self.model.weights_file and self.model.trainable != "lora":
            raise ConfigError(
                "pretrained = true with weights-file: the network can start from one of them; must be false, or "
                "trainable = 'lora' and the file one of adapters alone"
            )
        if self.data.first_class and not self.data.num_classes:
            raise ConfigError(
                f"first-class = {self.data.first_class} with num-classes = 0, all classes: must be 0, or num-classes above 0"
            )
        if 0 < self.data.num_classes < stream.window:
            raise ConfigError(f"window = {stream.window}: must be at most num-classes = {self.data.num_classes}")
        if self.buffer.capacity < self.data.num_classes:
            raise ConfigError(
                f"capacity = {self.buffer.capacity}: must be at least the number of classes, {self.data.num_classes}"
            )

    def _check_absences(self) -> None:
        away, clients = self.stream.away, self.stream.clients
        try:
            known = absences(away)
        except ValueError as error:
            raise ConfigError(f"away = {away!r:.100}: {error}") from error
        if known and max(known) >= clients:
            raise ConfigError(f"away = {away!r:.100}: client {max(known)}: the run has clients 0 to {clients - 1}")

    def _check_aggregation(self) -> None:
        rule, clients = self.aggregation.aggregation, self.stream.clients
        trained = self.stream.participants_per_round
        if rule != "mean" and self.privacy.secagg:
            raise ConfigError(
                f"aggregation = {rule!r} with secagg = true: the server learns only a sum; must be 'mean'"
            )
        if rule != "mean" and self.privacy.dp == "central":
            raise ConfigError(
                f"aggregation = {rule!r} with dp = 'central': the noise is calibrated for a mean; must be 'mean'"
            )
        self._check_defence_has_effect()
        if self.aggregation.hostile > (most := (trained - 1) // 2):
            raise ConfigError(
                f"aggregation = {rule!r} with {self._trained_in_words}: hostile must be less than half of the clients, "
                f"at most {most}"
            )
        if self.attack.attack != "none" and self.attack.hostile_clients > clients:
            raise ConfigError(f"hostile-clients = {self.attack.hostile_clients}: must be at most clients = {clients}")
        if self.attack.attack != "none" and self.data.arrives:
            raise ConfigError(
                f"attack = {self.attack.attack!r}: for simulations alone; with dataset = 'inbox', must be 'none'"
            )

    def _check_defence_has_effect(self) -> None:
        if self.aggregation.defence == "on" and self.training.optimiser != "adamw":
            raise ConfigError(
                f"defence = 'on' with optimiser = {self.training.optimiser!r}: the defence knows how far AdamW's steps go; "
                "must be 'off'"
            )
        if self.privacy.secagg:
            reason = "secagg = true: the server sees no single update"
        elif self.privacy.dp == "central":
            reason = "dp = 'central': the server scales updates down to dp-clip and does not compare them"
        else:
            return
        if self.aggregation.defence == "on":
            raise ConfigError(f"defence = 'on' with {reason}; must be 'off'")

    def _check_inbox(self) -> None:
        names = self.data.named_classes()
        if not self.data.grows and (len(names) < 2 or len(set(names)) < len(names) or not all(names)):
            raise ConfigError(
                f"class-names = {self.data.class_names!r}: with dataset = 'inbox', must be at least two different "
                "names, separated by commas"
            )
        if UNLABELLED in names:
            raise ConfigError(
                f"class-names = {self.data.class_names!r:.200}: {UNLABELLED!r} is the folder of pictures without a "
                "label; must be another name"
            )
        if shape := self.data.inbox_lengths():
            self.data.inbox_statistics_of(shape[0])
        elif self.data.image_size < 1:
            raise ConfigError(
                f"image-size = {self.data.image_size}: with dataset = 'inbox', must be at least 1, or inbox-shape be set, "
                "if samples are no pictures"
            )
        elif self.data.inbox_statistics:
            raise ConfigError(
                f"inbox-statistics = {self.data.inbox_statistics!r:.200}: is for samples with an inbox-shape; must be ''"
            )
        if self.buffer.capacity < len(names):
            raise ConfigError(
                f"capacity = {self.buffer.capacity}: must be at least the number of classes, {len(names)}"
            )
        if self.privacy.dp_seeded:
            raise ConfigError("dp-seeded = true: for simulation alone; dataset = 'inbox' requires unseeded noise")

    def _check_open_classes(self) -> None:
        names, most = self.data.named_classes(), self.data.max_classes
        if len(set(names)) < len(names) or not all(map(is_class_name, names)):
            raise ConfigError(
                f"class-names = {self.data.class_names!r:.200}: with classes = 'open', must be different names, "
                f"separated by commas, each {CLASS_NAME}"
            )
        if len(names) > most:
            raise ConfigError(f"max-classes = {most}: must be at least the number of class-names, {len(names)}")
        if self.buffer.capacity < most:
            raise ConfigError(f"capacity = {self.buffer.capacity}: must be at least max-classes = {most}")


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
