"""Only one module, and the listed programs of deploy/, use parts of Flower that Flower does not declare public."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERNALS = "fedkace_flwr/flower/internals.py"
COMPRESSED = "experiments/soak/compressed/sitecustomize.py"  # for Flower's processes in a soak
PUBLIC = {
    "flwr",
    "flwr.app",
    "flwr.client",
    "flwr.client.mod",
    "flwr.clientapp",
    "flwr.clientapp.mod",
    "flwr.common",
    "flwr.server",
    "flwr.server.workflow",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.simulation",
}
SHIPPED = ("fedkace_flwr", "strategies", "clients", "experiments")


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules from which a file imports, at any place; names imported from a package count as its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names if name.name.startswith("_"))
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def internal(source: str) -> set[str]:
    """Modules of Flower in a file's imports that are not public."""
    names = {name for name in imported(ast.parse(source)) if name.partition(".")[0] == "flwr"}
    return names - PUBLIC


def test_only_one_module_uses_what_is_not_public() -> None:
    paths = [path for name in SHIPPED for path in (ROOT / name).rglob("*.py")]
    assert len(paths) > 100
    users = {path.relative_to(ROOT).as_posix(): internal(path.read_text()) for path in paths}
    assert {path for path, names in users.items() if names} == {INTERNALS, COMPRESSED}


def test_the_list_names_every_module_that_is_used() -> None:
    source = (ROOT / INTERNALS).read_text()
    listed = ast.get_docstring(ast.parse(source)) or ""
    for name in internal(source):
        module = name.partition("._")[0].removeprefix("flwr.")
        assert f"``{module}``" in listed, f"{name} is not listed"


def test_the_list_names_what_the_programs_of_deploy_use_and_they_say_what_they_change() -> None:
    listed = ast.get_docstring(ast.parse((ROOT / INTERNALS).read_text())) or ""
    for path in (ROOT / "deploy").glob("*.py"):
        source = path.read_text()
        used = sorted(name.removeprefix("flwr.") for name in internal(source))
        if used:
            assert "Flower" in (ast.get_docstring(ast.parse(source)) or ""), path
        expected = f"``deploy/{path.name}``\n    {', '.join(f'``{name}``' for name in used)}"
        assert (expected + "\n" in listed + "\n") == bool(used), expected
