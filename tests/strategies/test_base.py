"""Server rules: hooks with defaults, written with public tools alone."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, MessageType

import fedkace_flwr.strategies
from fedkace_flwr.config import Config
from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.strategies.base import ServerRule

Make = Callable[..., Config]
FILES = sorted(Path(fedkace_flwr.strategies.__path__[0]).glob("*.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names_of_others(source: str) -> Iterator[str]:
    """Names with a leading underscore that a module uses and does not define for itself."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if is_private(alias.name))
    own = {id(each): kind for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for each in ast.walk(kind)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        kind = own.get(id(node))
        on_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if kind is None or not on_self or node.attr not in names_defined_in(kind):
            yield f"{ast.unparse(node)} (line {node.lineno})"


def names_defined_in(kind: ast.ClassDef) -> set[str]:
    methods = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    stored = {
        node.attr for node in ast.walk(kind) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return methods | stored


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rule_uses_no_private_name_of_another_class(path: Path) -> None:
    assert list(private_names_of_others(path.read_text())) == []


@pytest.mark.parametrize(
    "line", ["self._inherited", "now._report", "from fedkace_flwr.strategies.base import _hidden", "super()._form()"]
)
def test_the_check_finds_private_names(line: str) -> None:
    source = f"class Rule(Base):\n    def hook(self, now):\n        self._own = 1\n        self._own\n        {line}\n"
    (found,) = private_names_of_others(source)
    assert found.split(" ")[0] in line


def test_hooks_know_nothing_of_flowers_strategy() -> None:
    assert ServerRule.__mro__ == (ServerRule, object)
    assert not [name for name in vars(ServerRule) if is_private(name)]


def test_by_default_every_client_weighs_the_same_and_gets_the_global_model(small: Make) -> None:
    rule, arrays = ServerRule(small()), ArrayRecord()
    replies = [Reply(client, {"w": np.array([value])}, 10**client, {}) for client, value in enumerate([1.0, 2.0, 6.0])]
    now = SimpleNamespace(parameters=frozenset({"w"}))
    assert rule.merge(now, replies)["w"].tolist() == [3.0]  # type: ignore[arg-type]
    assert rule.model_for(2, arrays) is rule.between(None, arrays) is arrays  # type: ignore[arg-type]
    assert rule.extras_for(0) == {} and rule.state() == ({}, {}) and rule.train_action == MessageType.TRAIN
    assert rule.summary() == f"{rule.config.method} over 3 clients"
