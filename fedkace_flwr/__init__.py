"""FedKACE: streaming federated continual learning on Flower.

What notebooks and other programs use is imported when it is first asked for, so that importing this package costs
nothing. ``__init__.pyi`` tells the types.
"""

import importlib
import os.path

__version__ = "1.0.0"

_LAZY = {"load_model": "fedkace_flwr.export.loading", "run": "fedkace_flwr.experiments.api"}

# `clients`, `strategies` and `experiments` are links to folders beside this one in a checkout, and folders in a wheel.
# Flower packs no links into an app: there they are found beside this one.
if not os.path.exists(f"{__path__[0]}/clients"):  # noqa: PTH110  (starts without pathlib)
    __path__.append(os.path.dirname(__path__[0]))  # noqa: PTH120


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
