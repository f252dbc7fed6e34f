"""Safe YAML, and the settings of the command line, which are no YAML: each is read by the type of its key.

Files are of a bounded size and without repeated keys; in them ``1e-3`` is a number, ``off`` is text, and numbers that YAML 1.1 would take as
octal or to the base 60 are refused.

The time for a file grows in proportion to its size, whatever it holds.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fedkace_flwr.config import all_keys, declared_keys
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.studies.names import SUFFIXES, study_names
from fedkace_flwr.keys import Scalar, default_of
from fedkace_flwr.storage.files import read_text
from fedkace_flwr.storage.names import closest_path

# Far above any study. Aliases let a file of a few lines stand for billions of values.
_MOST_BYTES, _MOST_VALUES, _MOST_LETTERS, _DEEPEST, _LARGEST = 2**18, 100_000, 2**24, 20, 2**63
_LONGEST_NUMBER = 100  # characters; what is longer is text, and no pattern of a number is tried on it

_BOOL = "tag:yaml.org,2002:bool"
_MERGE = "tag:yaml.org,2002:merge"
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_OCTAL_OR_SEXAGESIMAL = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """A safe loader that reads 1e-3 as a number and off as text, as YAML 1.2 does; PyYAML follows YAML 1.1."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._flat: set[yaml.MappingNode] = set()

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and len(value) > _LONGEST_NUMBER:
            implicit = (False, implicit[1])
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolve merge keys (``<<``), which can multiply a mapping's entries; of each mapping once."""
        if node in self._flat:
            return
        self._flat.add(node)
        for key, value in node.value:
            if key.tag == _MERGE:
                parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
                merged = [part for part in parts if isinstance(part, yaml.MappingNode)]
                for part in merged:
                    self.flatten_mapping(part)
                if sum(len(part.value) for part in merged) > _MOST_VALUES:
                    raise yaml.constructor.ConstructorError(None, None, "too many values are merged", key.start_mark)
        super().flatten_mapping(node)


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A number that is declared as one (``!!int``), or looks like one."""
    if len(node.value) > _LONGEST_NUMBER:
        text = f"a number of {len(node.value)} characters; at most {_LONGEST_NUMBER} are read"
        raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
    if _OCTAL_OR_SEXAGESIMAL.fullmatch(node.value):
        text = f"{node.value} might be octal or to the base 60; write a decimal number, or text in quotes"
        raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
    construct = loader.construct_yaml_int if node.tag == _NUMBERS[0] else loader.construct_yaml_float
    return construct(node)


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    met = set()
    for key, _ in node.value:
        if key.value in met:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        met.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_repeats)
for _tag in _NUMBERS:
    _Loader.add_constructor(_tag, _number)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises
    ------
    ConfigError
        The file cannot be read, is not YAML, is too large, or holds something other than a mapping.
    """
    try:
        content = yaml.load(read_text(path, _MOST_BYTES), _Loader)
        _check_size(content)
    except OSError as error:
        own = f"; did you mean {path.stem}?" if path.parent == Path() and path.stem in study_names() else ""
        hint = closest_path(path, SUFFIXES) or own or "; name a study file"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}){hint}") from error
    except Exception as error:  # PyYAML raises arbitrary exceptions for odd tags and values
        line = (str(error).splitlines() or [""])[0] or type(error).__name__
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: is not YAML ({getattr(error, 'problem', None) or line})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys, for example config")
    return content


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Read ``key=value``: a text as it stands, a number or a truth value by the type of the key.

    What is not of the key's type remains text, which the key's check refuses.

    Raises
    ------
    ConfigError
        There is no equals sign, or no key.
    """
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text:.200}: must be key=value, for example --set overlap=0")
    kind = _kind(key.strip())
    return key.strip(), value if kind is str else _scalar(value.strip(), kind)


def _scalar(word: str, kind: type | None) -> Scalar:
    """Read a number or a truth value; of a key that is not known (``kind`` None), either."""
    if kind in (bool, None) and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if kind in (int, float, None) and len(word) <= _LONGEST_NUMBER:
        if _WHOLE.fullmatch(word):
            return int(word)
        if kind is not int and "_" not in word:
            with suppress(ValueError):
                return float(word)
    return word


def _kind(key: str) -> type | None:
    """Return the type of a key's values, or None if there is no such key."""
    from fedkace_flwr import registry as registry  # declares the methods' keys, and takes a second

    if key not in (known := declared_keys([key])):
        return None
    return type(default_of(known[key][0], key.replace("-", "_")))


def parse_settings(texts: Iterable[str]) -> tuple[dict[str, Scalar], dict[str, list[Scalar]]]:
    """Read several ``key=value``; a key with a list of values, such as ``epochs=5,10,20``, is a sweep.

    Keys that hold free text, such as folders and ``class-names``, are never sweeps: their values may contain commas.

    Returns
    -------
    settings : dict
        The keys with a single value.
    sweeps : dict
        The keys with several.

    Raises
    ------
    ConfigError
        As :func:`parse_setting`, or a value of a sweep is missing or given twice.
    """
    settings: dict[str, Scalar] = {}
    sweeps: dict[str, list[Scalar]] = {}
    for text in texts:
        key, value = parse_setting(text)
        settings.pop(key, None)
        sweeps.pop(key, None)
        if not isinstance(value, str) or "," not in value or key in _free_text():
            settings[key] = value
            continue
        words = [word.strip() for word in value.split(",")]
        if not all(words) or len(set(words)) < len(words):
            raise ConfigError(f"--set {text}: must be different values between commas, for example --set epochs=5,10")
        sweeps[key] = [parse_setting(f"{key}={word}")[1] for word in words]
    return settings, sweeps


def _free_text() -> set[str]:
    """Return the keys whose values are any text, apart from names of methods, data sets and networks."""
    free = {
        name
        for section, name, declared in all_keys()
        if isinstance(default_of(section, name.replace("-", "_")), str) and not declared.choices
    }
    return free - {"method", "dataset", "network"}


def _check_size(content: Any) -> None:
    """Check that parsed content can be traversed and quoted; every use of an alias counts.

    Raises
    ------
    ValueError
        It is too large, nested too deeply, or contains itself.
    """
    met, letters, waiting = 0, 0, [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        met += 1
        letters += len(value) if isinstance(value, str | bytes) else 0
        if met > _MOST_VALUES or letters > _MOST_LETTERS or depth > _DEEPEST or _is_too_large(value):
            raise ValueError("too many values, values nested too deeply, or a number that is too large")
        if isinstance(value, Mapping):
            waiting += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set):
            waiting += [(part, depth + 1) for part in value]


def _is_too_large(value: object) -> bool:
    return isinstance(value, int) and not -_LARGEST <= value < _LARGEST
