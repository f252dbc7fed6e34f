"""Study files as YAML, and settings of the command line: each value is a text that is read by the type of its key."""

import re
from collections.abc import Iterable
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

_MOST_BYTES, _MOST_ALIASES, _LONGEST_NUMBER = 2**18, 100, 100
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Reads mappings, lists and texts; a key is given once, and what an alias stands for holds none itself."""

    _aliases, _anchors = 0, 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            self._aliases += 1
            if self._anchors or self._aliases > _MOST_ALIASES:
                text = f"an alias below an anchor, or more than {_MOST_ALIASES} aliases"
                raise yaml.composer.ComposerError(None, None, text, mark)
            return super().compose_node(parent, index)
        self._anchors += event.anchor is not None
        node = super().compose_node(parent, index)
        self._anchors -= event.anchor is not None
        return node


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    met = set()
    for key, _ in node.value:
        if key.value in met:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        met.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.yaml_implicit_resolvers = {"<": [(f"{_TAG}merge", re.compile("^<<$"))]}
_Loader.yaml_constructors = {
    tag: build for tag, build in yaml.SafeLoader.yaml_constructors.items() if tag in (None, f"{_TAG}seq", f"{_TAG}str")
}
_Loader.add_constructor(f"{_TAG}map", _mapping_without_repeats)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; all scalars in it are texts.

    Raises
    ------
    ConfigError
        The file cannot be read, is not YAML, is too large, or holds something other than a mapping.
    """
    try:
        content = yaml.load(read_text(path, _MOST_BYTES), _Loader)
    except OSError as error:
        own = f"; did you mean {path.stem}?" if path.parent == Path() and path.stem in study_names() else ""
        hint = closest_path(path, SUFFIXES) or own or "; name a study file"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}){hint}") from error
    except Exception as error:  # PyYAML raises arbitrary exceptions for odd keys
        line = (str(error).splitlines() or [""])[0] or type(error).__name__
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: is not YAML ({getattr(error, 'problem', None) or line})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys, for example config")
    return content


def typed(key: str, value: Any) -> Any:
    """Read the text of a value by the type of its key; what is not of that type stays text, which the key's check refuses."""
    if not isinstance(value, str):
        return value
    kind = _kind(key)
    return value if kind is str else scalar(value.strip(), kind)


def scalar(word: str, kind: type | None) -> Scalar:
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


def parse_setting(text: str) -> tuple[str, Scalar]:
    """Read ``key=value``.

    Raises
    ------
    ConfigError
        There is no equals sign, or no key.
    """
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {text:.200}: must be key=value, for example --set overlap=0")
    return key.strip(), typed(key.strip(), value)


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
        sweeps[key] = [typed(key, word) for word in words]
    return settings, sweeps


def _free_text() -> set[str]:
    """Return the keys whose values are any text, apart from names of methods, data sets and networks."""
    free = {
        name
        for section, name, declared in all_keys()
        if isinstance(default_of(section, name.replace("-", "_")), str) and not declared.choices
    }
    return free - {"method", "dataset", "network"}
