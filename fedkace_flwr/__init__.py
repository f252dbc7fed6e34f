"""FedKACE: streaming federated continual learning on Flower.

What notebooks and other programs use is imported when it is first asked for, so that importing this package costs
nothing. ``__init__.pyi`` tells the types.
"""

import importlib
import sys

__version__ = "1.0.0"

_LAZY = {"load_model": "fedkace_flwr.export.loading", "run": "fedkace_flwr.experiments.api"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _LAZY[name]
    package = place.partition(".")[0]
    try:
        found: object = getattr(importlib.import_module(place), name)
    except ModuleNotFoundError as error:
        if error.name not in (package, place):
            raise
        other = getattr(sys.modules.get(package), "__file__", None) or "none"
        raise ImportError(
            f"{__name__}.{name} needs the package {package} of fedkace-flwr; Python finds {other}"
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
