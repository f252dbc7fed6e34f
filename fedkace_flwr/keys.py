"""Declarations of configuration keys: default, type, range, unit, meaning, and what a key affects.

A section is a frozen dataclass whose fields are created with :func:`key`. A field's type is bool, int, float, str, or
a ``Literal`` of the allowed words. In run configs, studies and records, a key has its field's name in kebab-case. Some
words take numbers, which may be left out: ``stream = "dirichlet:0.3:0.1"``.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unicodedata import normalize

from fedkace_flwr.errors import ConfigError, closest

Scalar = bool | int | float | str

Affects = Literal["numbers", "waiting", "place"]
"""What a key changes: the numbers of a run, how long it waits, or only where things are stored and how."""

_LARGEST = 2**63  # Flower's messages have 64 bits

LONGEST_NAME = 200
"""Most bytes of a name in a path, which leaves room in the system's 255 for the endings that programs add."""

PLAIN_NAME = f"a plain name: at most {LONGEST_NAME} bytes, printable, without slashes, and not beginning with a dot"
"""What :func:`is_plain_name` accepts, in words."""

UNLABELLED = "unlabelled"
"""The folder of an inbox for pictures whose class nobody has told yet."""

_NO_CLASS = frozenset({UNLABELLED, "unlabeled"})

CLASS_NAME = f"{PLAIN_NAME}, without commas or blanks around it, and not {UNLABELLED!r}"
"""What :func:`is_class_name` accepts, in words."""


ANY = "*"
"""In the words of a key, any word."""

Numbers = Mapping[str, int | float]
"""Numbers by name."""


@dataclass(frozen=True)
class Number:
    """A number that may follow a word, after a colon."""

    name: str
    default: int | float
    low: float | None = None
    above: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Key:
    """The meaning of a configuration key and its allowed values."""

    meaning: str
    unit: str = ""
    low: float | None = None
    above: float | None = None
    high: float | None = None
    affects: Affects = "numbers"
    living: bool = False
    choices: tuple[str, ...] = ()
    is_name: bool = False
    words: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)

    def numbers_of(self, word: str) -> tuple[Number, ...]:
        """Return the numbers that a word takes."""
        return self.words.get(word, self.words.get(ANY, ()))

    def range_text(self) -> str:
        """Return the allowed values in words; empty if every value of the type is allowed."""
        if self.choices:
            words = (
                ":".join([each, *(number.name.upper() for number in self.numbers_of(each))]) for each in self.choices
            )
            return ", ".join(f"`{word}`" for word in words)
        if self.is_name:
            return PLAIN_NAME
        low = f">= {self.low:g}" if self.low is not None else f"> {self.above:g}" if self.above is not None else ""
        high = f"<= {self.high:g}" if self.high is not None else ""
        return " and ".join(part for part in (low, high) if part)

    def allows(self, value: Scalar) -> bool:
        """Return whether ``value``, which has the right type, is in the range."""
        if self.choices:
            return (str(value).partition(":")[0] if self.words else value) in self.choices
        if isinstance(value, str) and self.is_name:
            return not value or is_plain_name(value)
        if isinstance(value, str | bool):
            return True
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )


def key(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    affects: Affects = "numbers",
    living: bool = False,
    is_name: bool = False,
    words: Mapping[str, tuple[Number, ...]] | None = None,
) -> Any:
    """Declare a configuration key as a field of a section.

    Parameters
    ----------
    default : bool, int, float or str
        The default, of the key's type.
    meaning : str
        Description for the documentation, in Markdown.
    unit : str
        Unit of the value, for the documentation.
    low, above, high : float, optional
        Inclusive lower bound, exclusive lower bound, inclusive upper bound.
    affects : {"numbers", "waiting", "place"}
        What the key changes. A run can be resumed with a different value unless the key affects numbers.
    living : bool
        Whether a run can be resumed with a different value although the key affects numbers: what clients and server have
        stored stays valid.
    is_name : bool
        Whether the value becomes a part of a path, and must not lead out of its folder; it may be empty.
    words : mapping, optional
        The allowed words of a key of text, with the numbers that each takes; :data:`ANY` stands for any word.
        :func:`word_of` reads them.
    """
    declared = Key(meaning, unit, low, above, high, affects, living, is_name=is_name, words=words or {})
    return field(default=default, metadata={"key": declared})


def word_of(section: object, name: str) -> tuple[str, Numbers]:
    """Return the word of a key that has passed :func:`checked`, by field name, and its numbers, defaults included."""
    word, *given = str(getattr(section, name)).split(":")
    declared = keys_of(type(section))[name].numbers_of(word)
    found = {each.name: type(each.default)(text) for each, text in zip(declared, given, strict=False)}
    return word, {each.name: each.default for each in declared} | found


def is_plain_name(name: str) -> bool:
    """Return whether a name can be a part of a path, so that the path stays in its folder and names no hidden file."""
    return (
        name.isprintable()
        and not name.startswith(".")
        and not set(name) & set("/\\")
        and 0 < len(os.fsencode(name)) <= LONGEST_NAME
    )


def is_class_name(name: str) -> bool:
    """Return whether a name can be that of a class: a plain name in Unicode's composed form, without commas."""
    composed = name == normalize("NFC", name).strip()
    return is_plain_name(name) and "," not in name and composed and name not in _NO_CLASS


def kebab(name: str) -> str:
    """Return a field's name as users write it."""
    return name.replace("_", "-")


def keys_of(section: type) -> dict[str, Key]:
    """Return the keys of a section by field name, in order of declaration, with the choices given by their types."""
    return dict(_keys_of(section))


@cache
def _keys_of(section: Any) -> dict[str, Key]:
    hints, found = get_type_hints(section), dict[str, Key]()
    for each in fields(section):
        if "key" in each.metadata:
            declared: Key = each.metadata["key"]
            choices = get_args(hints[each.name]) if get_origin(hints[each.name]) is Literal else (*declared.words,)
            found[each.name] = replace(declared, choices=() if ANY in choices else choices)
    return found


def default_of(section: type, name: str) -> Scalar:
    """Return the default of a section's key, by field name."""
    value = next(each.default for each in fields(section) if each.name == name)
    assert isinstance(value, bool | int | float | str)
    return value


def checked(name: str, value: object, of: Key, default: Scalar) -> Scalar:
    """Return the value if it has the key's type and is in its range; whole numbers are accepted as floats.

    Numbers after a word that are the defaults are left out, so that equal values are the same text.

    Raises
    ------
    ConfigError
        It has another type or is out of range.
    """
    kind = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    if type(value) is not kind:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise ConfigError(f"{name} = {value!r:.200}: must be {words[kind]}")
    assert isinstance(value, bool | int | float | str)
    if not of.allows(value):
        wanted = ["finite"] if isinstance(value, float) and not math.isfinite(value) else []
        if of.range_text():
            wanted.append(("one of " if of.choices else "") + of.range_text().replace("`", ""))
        hint = closest(value, of.choices) if isinstance(value, str) else ""
        raise ConfigError(f"{name} = {value!r:.200}: must be {' and '.join(wanted)}{hint}")
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        shown = value if abs(value) < 10**100 else "a number of more than 100 digits"
        raise ConfigError(f"{name} = {shown}: must be at least -2^63 and less than 2^63")
    return _shortest(name, value, of) if isinstance(value, str) and of.words else value


def _shortest(name: str, text: str, of: Key) -> str:
    """A word with its numbers, each checked, but for defaults at the end."""
    word, *given = text.split(":")
    declared = of.numbers_of(word)
    if len(given) > len(declared):
        raise ConfigError(f"{name} = {text!r:.200}: {word} takes {len(declared) or 'no'} numbers after it")
    numbers = []
    for each, part in zip(declared, given, strict=False):
        told = f"{name} = {text!r:.200}: {each.name}"
        try:
            number = type(each.default)(part)
        except ValueError:
            kind = "a whole number" if isinstance(each.default, int) else "a number"
            raise ConfigError(f"{told}: must be {kind}") from None
        numbers.append(checked(told, number, Key("", "", each.low, each.above, each.high), each.default))
    return joined(word, numbers, [each.default for each in declared])


def joined(word: str, numbers: Sequence[object], defaults: Sequence[object]) -> str:
    """Return a word with its numbers, without those at the end that are the defaults."""
    most = max(
        (place for place, pair in enumerate(zip(numbers, defaults, strict=False), 1) if pair[0] != pair[1]), default=0
    )
    return ":".join([word, *(str(number).removesuffix(".0") for number in numbers[:most])])
