"""FedKACE: streaming federated continual learning on Flower.

What notebooks and other programs use is imported when it is first asked for, so that importing this package costs
nothing. ``__init__.pyi`` tells the types.
"""

import importlib

__version__ = "1.0.0"

_LAZY = {"load_model": "fedkace_flwr.export.loading"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
