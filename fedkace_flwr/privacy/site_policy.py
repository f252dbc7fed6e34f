"""A site's own policy: a file on a machine that says which runs its client takes part in.

The run's configuration comes from the server. A policy keeps the server from switching off a client's noise, asking for
labels, or training without end. The client checks it before it does anything for a run. It binds only an app that
contains this check: which apps run at all is for signatures to decide (docs/signed-apps.md).
"""

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config, all_keys, declared_keys, hint
from fedkace_flwr.errors import ConfigError, PolicyError, closest
from fedkace_flwr.keys import Key, Scalar, checked, default_of
from fedkace_flwr.storage.files import read_text

POLICY = "policy"
"""Key of the node config that names the file."""

VARIABLE = "FEDKACE_POLICY"
"""Environment variable that names the file if the node config does not."""

_LARGEST = 2**20  # bytes of a file
_FOR_THE_SERVER_ALONE = frozenset(
    {"run-name", "resume", "tracker", "on-alarm", "metrics-port", "past-models", "quorum", "gate-tolerance"}
)
_ENDLESS_AT_ZERO = frozenset({"rounds", "threads", "num-classes", "test-per-class"})
_ANY, _DEFAULT = "any", "default"
_TELL, _REFUSE = "tell", "refuse"


@dataclass(frozen=True)
class _Rule:
    """The accepted values of one key: some values, or a range."""

    values: tuple[Scalar, ...] = ()
    low: float | None = None
    high: float | None = None

    def accepts(self, value: Scalar) -> bool:
        """Return whether a value, which has the key's type, is accepted."""
        if self.values:
            return value in self.values
        assert not isinstance(value, str)
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def text(self) -> str:
        """Return the accepted values in words."""
        if self.values:
            return "only " + " or ".join(map(repr, self.values))
        if self.low is None:
            return f"at most {self.high}"
        return f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class SitePolicy:
    """What a site accepts.

    Attributes
    ----------
    path : Path
        The file, for messages.
    labels : bool
        Whether methods that send labels of samples are accepted.
    only_defaults : bool
        Whether keys that a client obeys and have no rule must have their default.
    rules : mapping
        Rules by key.
    new_classes : bool
        Whether names of classes that no one has named yet may be told to the server.
    own_state : bool
        Whether the node names a folder for the client's state itself, so that it does not follow ``results-dir``.
    """

    path: Path
    labels: bool
    only_defaults: bool
    rules: Mapping[str, _Rule]
    new_classes: bool = True
    own_state: bool = False

    def check(self, asked: Config, config: Config, *, sends_labels: bool) -> None:
        """Refuse a run that the site does not accept.

        Parameters
        ----------
        asked : Config
            The configuration as the server sends it.
        config : Config
            The configuration as the client uses it: with the method's preset.
        sends_labels : bool
            Whether the method sends labels of samples.

        Raises
        ------
        PolicyError
            The run is refused; the message names the key, its value and what is accepted.
        """
        values = config.flat()
        for name, rule in self.rules.items():
            if name in values and not rule.accepts(values[name]):
                self._refuse(name, values[name], rule.text())
        if sends_labels and not self.labels:
            self._refuse("method", config.method, "no method that sends labels of samples (labels = false)")
        if self.only_defaults:
            defaults, sent = replace(Config(), method=asked.method).flat() | {"method": Config().method}, asked.flat()
            for _, name, declared in all_keys():
                obeyed = name not in self.rules and self._is_obeyed(name, declared)
                if obeyed and sent.get(name) != defaults.get(name):
                    self._refuse(name, sent[name], f"only its default, {defaults[name]!r} (unlisted = 'default')")

    def _is_obeyed(self, name: str, declared: Key) -> bool:
        """Whether a client does what a key says, and not the server alone."""
        if declared.affects == "waiting" or name in _FOR_THE_SERVER_ALONE:
            return False
        return not (self.own_state and name in ("results-dir", "state-dir"))

    def _refuse(self, name: str, value: Scalar, accepted: str) -> None:
        raise PolicyError(f"{self.path}: {name} = {value!r:.200}: this site accepts {accepted}")


def policy_of_site(
    node_config: Mapping[str, Scalar], names: Mapping[str, Collection[str]] | None = None
) -> SitePolicy | None:
    """Return the policy of the machine that this process runs on; None if it has none.

    Parameters
    ----------
    node_config : mapping
        The node's own configuration.
    names : mapping, optional
        As in :func:`read_policy`.

    Raises
    ------
    PolicyError
        The file that the machine names cannot be read, so no run is accepted.
    """
    path = node_config.get(POLICY) or os.environ.get(VARIABLE, "")
    if not path:
        return None
    policy = read_policy(Path(str(path)).expanduser(), names)
    return replace(policy, own_state=bool(node_config.get("state-dir")))


def read_policy(path: Path, names: Mapping[str, Collection[str]] | None = None) -> SitePolicy:
    """Read a policy; docs/signed-apps.md describes the format.

    Parameters
    ----------
    path : Path
        The file.
    names : mapping, optional
        Keys whose values are names, such as ``method``, with all the names that they can have here.

    Raises
    ------
    PolicyError
        The file cannot be read, or an entry is unknown or has no meaning.
    """
    try:
        table = tomllib.loads(read_text(path, _LARGEST))
    except OSError as error:
        raise PolicyError(f"{path}: the site's policy cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # TOML and UTF-8
        raise PolicyError(f"{path}: is not valid TOML ({error!s:.200})") from error
    try:
        policy = _parsed(path, table)
        for key, known in (names or {}).items():
            for name in policy.rules[key].values if key in policy.rules else ():
                if str(name).partition("?")[0].partition(":")[0] not in known:
                    meant = closest(str(name), known)
                    raise ConfigError(f"{key} = {name!r:.200}: must be one of {', '.join(known)}{meant}")
        return policy
    except ConfigError as error:
        raise PolicyError(f"{path}: {error}") from error


def _parsed(path: Path, table: Mapping[str, Any]) -> SitePolicy:
    known = {"labels", "unlisted", "new-classes", "keys"}
    for name in table.keys() - known:
        words = f"unknown entry {name!r:.100}; must be one of {', '.join(sorted(known))}{closest(name, known)}"
        raise PolicyError(f"{path}: {words}")
    labels, unlisted, rules = table.get("labels", True), table.get("unlisted", _ANY), table.get("keys", {})
    if not isinstance(labels, bool):
        raise PolicyError(f"{path}: labels = {labels!r:.100}: must be true or false")
    new_classes = table.get("new-classes", _TELL)
    choices = {"unlisted": (unlisted, _ANY, _DEFAULT), "new-classes": (new_classes, _TELL, _REFUSE)}
    for name, (value, *accepted) in choices.items():
        if value not in accepted:
            one, other = accepted
            meant = closest(str(value), accepted)
            raise PolicyError(f"{path}: {name} = {value!r:.100}: must be {one!r} or {other!r}{meant}")
    if not isinstance(rules, dict):
        raise PolicyError(f"{path}: keys = {rules!r:.100}: must be a table")
    return SitePolicy(path, labels, unlisted == _DEFAULT, dict(_rules(rules)), new_classes == _TELL)


def _rules(table: Mapping[str, Any]) -> Iterator[tuple[str, _Rule]]:
    declared = declared_keys(table)
    for name, wanted in table.items():
        if name not in declared:
            raise ConfigError(f"unknown key {name!r:.100}{hint(name, declared)}")
        section, key = declared[name]
        yield name, _rule(name, wanted, key, default_of(section, name.replace("-", "_")))


def _rule(name: str, wanted: Any, declared: Key, default: Scalar) -> _Rule:
    if not isinstance(wanted, dict):
        values = wanted if isinstance(wanted, list) else [wanted]
        if not values:
            raise ConfigError(f"{name} = []: must name at least one value")
        return _Rule(tuple(checked(name, value, declared, default) for value in values))
    if isinstance(default, bool | str) or not wanted or not wanted.keys() <= {"min", "max"}:
        form = "a value or a list of values" + ("" if isinstance(default, bool | str) else ", or min and max")
        raise ConfigError(f"{name} = {wanted!r:.100}: must be {form}")
    bounds = {end: checked(f"{name}, {end}", value, declared, default) for end, value in wanted.items()}
    low, high = (bounds.get(end) for end in ("min", "max"))
    if low is None and name in _ENDLESS_AT_ZERO:
        low = 1
    assert not isinstance(low, str) and not isinstance(high, str)
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{name}: min = {low} is larger than max = {high}")
    return _Rule(low=low, high=high)
