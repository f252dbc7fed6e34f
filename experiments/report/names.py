"""What methods, cells and configuration keys are called in a report."""

from collections.abc import Mapping
from typing import Any

_METHODS = {
    "fedkace": "FedKACE",
    "fedavg": "FedAVG",
    "fedcbdr": "FedCBDR",
    "ofcl": "OFCL",
    "refed": "Re-Fed",
    "tfcl": "TFCL",
    "dcfcl": "DCFCL",
    "er": "ER",
    "lkc": "LKC",
    "centralized": "Centralized",
    **{f"as{number}": f"AS{number}" for number in range(1, 9)},
}
_ORDER = list(_METHODS)
_SYMBOLS = {"overlap": "O", "capacity": "M", "clients": "K", "rounds": "T", "epochs": "J", "window": "W"}
_DATA = {"cifar100": "CIFAR-100", "imagenet100": "ImageNet100", "digits": "digits"}
ABLATIONS = (*(f"as{number}" for number in range(1, 9)), "lkc")


def method_name(method: str) -> str:
    """A method as the paper spells it."""
    return _METHODS.get(method, method)


def method_rank(method: str) -> tuple[int, str]:
    """Sorts methods: FedKACE first, rivals, ablations by number, Centralized."""
    order = {"fedkace": 0, "centralized": 99}
    return order.get(method, _ORDER.index(method) + 1 if method in _ORDER else 50), method


def data_name(data: str) -> str:
    """A data set as the paper spells it, roughly."""
    return _DATA.get(data, data)


def axis_label(axis: str, value: Any) -> str:
    """A value on an axis: ``CIFAR-100``, ``O=4``, ``batching=paired``."""
    if axis == "data":
        return data_name(str(value))
    if axis == "method":
        return method_name(str(value))
    return f"{_SYMBOLS.get(axis, axis)}={value}"


def labelled(values: Mapping[str, Any]) -> str:
    """Several axes at once: ``CIFAR-100, O=4``."""
    return ", ".join(axis_label(axis, value) for axis, value in values.items())
