"""Packages that add a network, a data set or a method."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedkace_flwr.registry import METHODS, OWN_METHODS


def declared(folder: Path, kind: str, name: str, value: str, package: str = "broken", **modules: str) -> None:
    """Install a package with one entry point, as pip would leave it."""
    facts = folder / f"{package}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[fedkace_flwr.{kind}s]\n{name} = {value}\n")
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)


@contextmanager
def plugins_forgotten() -> Iterator[None]:
    """What is added to the registries of this process meanwhile is gone afterwards."""
    modules = set(sys.modules)
    try:
        yield
    finally:
        for name in set(METHODS) - set(OWN_METHODS):
            del METHODS[name]
        for name in [name for name in sys.modules if name not in modules and name.partition("_")[0] in ("my", "made")]:
            del sys.modules[name]
