"""Reading a model's file, which anyone may have written: nothing in it is executed, and everything is checked.

No memory is taken for a network before its tensors are known to be there.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import FedkaceError, ModelError
from fedkace_flwr.inference.kept_models import KeptModels
from fedkace_flwr.inference.tensor_file import (
    CHECKSUM,
    FORMATS,
    MARK,
    METADATA,
    RUN,
    TEXTS,
    checksum,
    header_of,
)
from fedkace_flwr.networks.catalogue import NETWORKS, built
from fedkace_flwr.networks.network import Blueprint
from fedkace_flwr.storage.npz import Array

_NUMBERS = {"round": 0, "trained": 0, "width": 1, "image_size": 1, "shorter_side": 1}  # with the least value
_MOST = 2**31 - 1
_LARGEST_IMAGE, _MOST_CLASSES = 4096, 2**16
_CHOICES = {
    "stem": ("auto", "cifar", "imagenet"),
    "precision": ("float32", "bfloat16"),
    "combined": ("most-confident", "mean"),
    "scaling": ("pillow", "torch"),
}


def unpack(content: bytes) -> KeptModels:
    """Undo :func:`fedkace_flwr.inference.tensor_file.pack`.

    Raises
    ------
    ModelError
        It is damaged, is not such a file, or its parts contradict each other.
    """
    header, start = header_of(content)
    strings = header.get(METADATA)
    if not isinstance(strings, dict) or MARK not in strings:
        raise ModelError("it is no model of fedkace_flwr: its metadata does not say how to use it")
    if strings[MARK] not in FORMATS:
        raise ModelError(f"it has format {strings[MARK]!r:.40}, and this program reads formats {' and '.join(FORMATS)}")
    if CHECKSUM in strings and strings[CHECKSUM] != checksum(strings, header, content[start:]):
        raise ModelError("it is damaged: its checksum does not match")
    try:
        arrays = safetensors.numpy.load(content)
    except Exception as fault:  # its parser's errors have no common class
        raise ModelError(f"it is damaged ({fault!s:.200})") from fault
    kept = _parsed(strings)
    kept = replace(kept, weights=_by_network(kept, arrays))
    _check_shapes(kept)
    return kept


def _parsed(strings: Mapping[str, Any]) -> KeptModels:
    """The description, checked; without weights."""
    told = {name: _value(strings, name) for name in (*TEXTS, *_NUMBERS, *_CHOICES)}
    classes = _value(strings, "class_names")
    if not _is_list(classes, str) or not 0 < len(classes) <= _MOST_CLASSES:
        raise _wrong("class_names", classes, "a list of names")
    answers, mirrored = _value(strings, "answers"), _value(strings, "mirrored")
    if not isinstance(answers, dict) or not answers:
        raise _wrong("answers", answers, "networks with the classes that they predict")
    if not _is_list(mirrored, str) or not set(mirrored) <= set(answers):
        raise _wrong("mirrored", mirrored, "a list of networks that predict")
    weighted = strings[MARK] != FORMATS[0]
    shares = _value(strings, "shares") if weighted else {}
    if weighted and not _are_shares(shares, answers, mirrored):
        raise _wrong("shares", shares, "a weight of each network that predicts; all views have 1 together")
    switched = _value(strings, "switched_at")
    if switched is not None and not _is_number(switched, 0):
        raise _wrong("switched_at", switched, "a round, or null")
    return KeptModels(
        method=told["method"],
        run=_value(strings, RUN) if RUN in strings else "",
        round=told["round"],
        trained=told["trained"],
        switched_at=switched,
        seen=_labels("classes_met", _value(strings, "classes_met"), len(classes)),
        class_names=tuple(classes),
        framing=Framing(told["image_size"], told["shorter_side"], told["scaling"]),
        mean=_triple(strings, "mean", -math.inf),
        std=_triple(strings, "std", 0.0),
        width=told["width"],
        stem=told["stem"],
        precision=told["precision"],
        answers={name: _labels("answers", found, len(classes)) for name, found in answers.items()},
        weights={},
        combined=told["combined"],
        mirrored=tuple(mirrored),
        shares=shares,
        network=told["network"],
    )


def _value(strings: Mapping[str, Any], name: str) -> Any:
    text = strings.get(name)
    if not isinstance(text, str):
        raise ModelError(f"its metadata lacks {name}")
    if name in (*TEXTS, RUN):
        value: Any = text
    else:
        try:
            value = json.loads(text)
        except (RecursionError, ValueError) as fault:
            raise _wrong(name, text, "JSON") from fault
    if name in _CHOICES and value not in _CHOICES[name]:
        raise _wrong(name, value, " or ".join(_CHOICES[name]))
    if name in _NUMBERS:
        most = _LARGEST_IMAGE if name in ("image_size", "shorter_side") else _MOST
        if not _is_number(value, _NUMBERS[name], most):
            raise _wrong(name, value, f"a whole number from {_NUMBERS[name]} to {most}")
    return value


def _labels(name: str, found: object, classes: int) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(_is_number(each, 0, classes - 1) for each in found):
        raise _wrong(name, found, f"numbers of classes, from 0 to {classes - 1}")
    return tuple(sorted(set(found)))


def _triple(strings: Mapping[str, Any], name: str, above: float) -> tuple[float, float, float]:
    found = _value(strings, name)
    if (
        not isinstance(found, list)
        or len(found) != 3
        or not all(type(each) in (int, float) and abs(each) < _MOST and each > above for each in found)
    ):
        raise _wrong(name, found, "three numbers")
    red, green, blue = map(float, found)
    return red, green, blue


def _are_shares(found: object, answers: Mapping[str, object], mirrored: Sequence[str]) -> bool:
    if not isinstance(found, dict) or set(found) != set(answers):
        return False
    if not all(type(each) in (int, float) and 0 <= each <= 1 for each in found.values()):
        return False
    return math.isclose(sum(each * (1 + (name in mirrored)) for name, each in found.items()), 1, abs_tol=1e-6)


def _is_number(value: object, least: int, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _wrong(name: str, value: object, wanted: str) -> ModelError:
    return ModelError(f"its metadata says {name} = {value!r:.200}; must be {wanted}")


def _by_network(kept: KeptModels, arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    if len(kept.answers) == 1:
        return {name: dict(arrays) for name in kept.answers}
    weights: dict[str, dict[str, Array]] = {name: {} for name in kept.answers}
    for name, array in arrays.items():
        network, _, key = name.partition(".")
        if network not in weights:
            raise ModelError(f"it holds {name!r:.200}, which belongs to none of its networks")
        weights[network][key] = array
    return weights


def _check_shapes(kept: KeptModels) -> None:
    """Compare the tensors with those of the network that the file names, before any memory is taken for it."""
    if kept.network not in NETWORKS:  # another package's may not permit it; it is compared when it is filled
        return
    blueprint = Blueprint(len(kept.class_names), kept.framing.size, kept.width, kept.stem)
    try:
        with torch.device("meta"):
            wanted = built(kept.network, blueprint).state_dict()
    except (FedkaceError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as fault:
        raise ModelError(f"its metadata describes no network ({' '.join(str(fault).split()):.200})") from fault
    for weights in kept.weights.values():
        _check_names(weights, wanted)
        for name, tensor in wanted.items():
            array = weights[name]
            if array.shape != tuple(tensor.shape) or array.dtype.kind != _kind(tensor):
                found = f"{array.dtype} {array.shape}"
                raise ModelError(f"{name!r} is {found:.200}; must be {tensor.dtype} {tuple(tensor.shape)}")
            if not bool(np.isfinite(array).all()):
                raise ModelError(f"{name!r} holds values that are not finite")


def _check_names(found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    for name in wanted:
        if name not in found:
            raise ModelError(f"it lacks {name!r}, which its network has")
    for name in found:
        if name not in wanted:
            raise ModelError(f"it holds {name!r:.200}, which its network has not")


def _kind(tensor: torch.Tensor) -> str:
    return "f" if tensor.is_floating_point() else "i"
