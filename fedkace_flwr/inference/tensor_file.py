"""A model in one file of safetensors: the tensors that predicting needs, and how to use them, as plain strings.

The file of one network holds its state dict under its own names; where several networks predict together, each name
begins with the network's. The same model always makes the same bytes. Anyone may have written a file that is read:
nothing in it is executed, everything is checked, and no memory is taken for a network before its tensors are known to be
there.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import FedkaceError, ModelError
from fedkace_flwr.inference.kept_models import KeptModels
from fedkace_flwr.networks.catalogue import NETWORKS, built
from fedkace_flwr.networks.network import Blueprint
from fedkace_flwr.sections.runs import TIMM
from fedkace_flwr.storage.atomic import METADATA, Array, header_of

FORMATS = ("1", "2", "3")
"""Versions of what a file says about its tensors: the second has ``shares``, and is written for models that have them; the
third is written for models of arrays, and has ``shape`` in place of what is said of pictures."""

_MARK = "fedkace_flwr"  # the name of the string with the format's version
_RUN, _CHECKSUM = "run", "sha256"  # only a client's file has them: its run, and the SHA-256 of all else in the file
_MEAN = "mean"  # how several networks predict together
_TEXTS = ("method", "network", "stem", "precision", "scaling", "combined")  # written as they are; the rest as JSON
_LENGTH_BYTES, _ALIGNED = 8, 8
_LEAST_STD = 1 / 255  # below it, preprocessing takes this value
_MOST = 2**31 - 1
_MOST_FLOAT32 = 3.4e38
_LARGEST_IMAGE, _MOST_CLASSES, _MOST_VALUES = 4096, 2**16, 2**26
_Check = tuple[Callable[[Any], bool], str]  # whether a value is right, and what would be


def described(kept: KeptModels) -> dict[str, Any]:
    """What the file says about its tensors, as values ready for JSON; :func:`pack` writes each as a string."""
    taken: dict[str, Any] = {"shape": list(kept.shape)}
    if kept.framing:
        taken = {
            "image_size": kept.framing.size,
            "shorter_side": kept.framing.shorter,
            "scaling": kept.framing.scaling,
        }
    return {
        "method": kept.method,
        "network": kept.network,
        "width": kept.width,
        "stem": kept.stem,
        "precision": kept.precision,
        **taken,
        "mean": list(kept.mean),
        "std": [max(value, _LEAST_STD) if kept.framing else value for value in kept.std],
        "class_names": list(kept.class_names),
        "classes_met": list(kept.seen),
        "answers": {name: list(classes) for name, classes in kept.answers.items()},
        "combined": _MEAN,
        "mirrored": list(kept.mirrored),
        **({"shares": dict(kept.shares)} if kept.shares else {}),
        "round": kept.round,
        "trained": kept.trained,
        "switched_at": kept.switched_at,
    }


def format_of(kept: KeptModels) -> str:
    """The oldest format that can describe a model."""
    return FORMATS[bool(kept.shares)] if kept.framing else FORMATS[2]


def pack(kept: KeptModels, *, stored: bool = False) -> bytes:
    """Return the content of the file; of the networks, it holds those that predict.

    Parameters
    ----------
    kept : KeptModels
        The models.
    stored : bool
        Whether a client keeps the file: with its run and a checksum.
    """
    alone = len(kept.answers) == 1
    arrays = {
        (key if alone else f"{name}.{key}"): np.require(array, requirements="C")
        for name in kept.answers
        for key, array in kept.weights[name].items()
    }
    strings = {name: value if name in _TEXTS else json.dumps(value) for name, value in described(kept).items()}
    content = safetensors.numpy.save(arrays)
    header, start = header_of(content)
    strings = {"format": "pt", _MARK: format_of(kept), **strings}
    if stored:
        strings[_RUN] = kept.run
        strings[_CHECKSUM] = _checksum(strings, header, content[start:])
    header = {METADATA: strings, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + content[start:]


def unpack(content: bytes) -> KeptModels:
    """Undo :func:`pack`.

    Raises
    ------
    ModelError
        It is damaged, is not such a file, or its parts contradict each other.
    """
    header, start = header_of(content)
    strings = header.get(METADATA)
    if not isinstance(strings, dict) or _MARK not in strings:
        raise ModelError("it is no model of fedkace_flwr: its metadata does not say how to use it")
    if strings[_MARK] not in FORMATS:
        raise ModelError(
            f"it has format {strings[_MARK]!r:.40}, and this program reads formats {', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
        )
    if _CHECKSUM in strings and strings[_CHECKSUM] != _checksum(strings, header, content[start:]):
        raise ModelError("it is damaged: its checksum does not match")
    try:
        arrays = safetensors.numpy.load(content)
    except Exception as fault:  # its parser's errors have no common class
        raise ModelError(f"it is damaged ({fault!s:.200})") from fault
    kept = _parsed(strings)
    kept = replace(kept, weights=_by_network(kept, arrays))
    _check_shapes(kept)
    return kept


def _checksum(strings: Mapping[str, Any], header: Mapping[str, Any], tensors: bytes) -> str:
    """SHA-256 of a file's strings but the checksum, of what its header says about the tensors, and of these."""
    told = [{**strings, _CHECKSUM: ""}, {**header, METADATA: ""}]
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    found.update(tensors)
    return found.hexdigest()


def _whole(least: int, most: int = _MOST) -> _Check:
    return lambda found: type(found) is int and least <= found <= most, f"a whole number from {least} to {most}"


def _one_of(*choices: str) -> _Check:
    return lambda found: found in choices, " or ".join(choices)


def _numbers(count: int, above: float) -> _Check:
    wanted = "three numbers" if count == 3 else f"a list of {count} numbers"
    return lambda found: _is_list(found, int, float) and len(found) == count and min(found) > above, wanted


def _is_list(found: object, *kinds: type) -> bool:
    return isinstance(found, list) and all(type(each) in kinds and _is_finite(each) for each in found)


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return abs(value) < _MOST_FLOAT32
    return not isinstance(value, int) or abs(value) < _MOST


_TEXT: _Check = lambda found: isinstance(found, str), "a text"
_CHECKS: dict[str, _Check] = {
    "method": _TEXT,
    "network": _TEXT,
    "stem": _one_of("auto", "cifar", "imagenet"),
    "precision": _one_of("float32", "bfloat16"),
    "round": _whole(0),
    "trained": _whole(0),
    "switched_at": (lambda found: found is None or _whole(0)[0](found), "a round, or null"),
    "width": _whole(1),
    "class_names": (lambda found: _is_list(found, str) and 0 < len(found) <= _MOST_CLASSES, "a list of names"),
    "answers": (lambda found: isinstance(found, dict) and bool(found), "networks with the classes that they predict"),
    "mirrored": (lambda found: _is_list(found, str), "a list of networks that predict"),
}
_OF_PICTURES: dict[str, _Check] = {
    "image_size": _whole(1, _LARGEST_IMAGE),
    "shorter_side": _whole(1, _LARGEST_IMAGE),
    "scaling": _one_of("pillow", "torch"),
}
_OF_ARRAYS: dict[str, _Check] = {
    "shape": (
        lambda found: _is_list(found, int) and min(found, default=0) > 0 and math.prod(found) <= _MOST_VALUES,
        f"lengths of an array of at most {_MOST_VALUES} values",
    )
}


def _taken(strings: Mapping[str, Any]) -> dict[str, Any]:
    """What the networks take, as fields of the models."""
    arrays = strings[_MARK] == FORMATS[2]
    told = {name: _value(strings, name, *check) for name, check in (_OF_ARRAYS if arrays else _OF_PICTURES).items()}
    if arrays:
        taken: dict[str, Any] = {"framing": None, "shape": tuple(told["shape"])}
    else:
        taken = {"framing": Framing(told["image_size"], told["shorter_side"], told["scaling"])}
    length = taken["shape"][0] if arrays else 3
    for name, above in (("mean", -math.inf), ("std", 0.0)):
        taken[name] = tuple(map(float, _value(strings, name, *_numbers(length, above))))
    return taken


def _parsed(strings: Mapping[str, Any]) -> KeptModels:
    """The description, checked; without weights."""
    told = {name: _value(strings, name, *check) for name, check in _CHECKS.items()}
    answers, mirrored, classes = told.pop("answers"), told.pop("mirrored"), len(told["class_names"])
    labels: _Check = (
        lambda found: _is_list(found, int) and found and all(0 <= each < classes for each in found),
        f"numbers of classes, from 0 to {classes - 1}",
    )
    for found in answers.values():
        if not labels[0](found):
            raise _wrong("answers", found, labels[1])
    if len(answers) > 1:
        _value(strings, "combined", *_one_of(_MEAN))
    if not set(mirrored) <= set(answers):
        raise _wrong("mirrored", mirrored, _CHECKS["mirrored"][1])

    def are_shares(found: Any) -> bool:
        if not isinstance(found, dict) or set(found) != set(answers) or not _is_list([*found.values()], int, float):
            return False
        total = sum(each * (1 + (name in mirrored)) for name, each in found.items())
        return min(found.values()) >= 0 and math.isclose(total, 1, abs_tol=1e-6)

    shares = {}
    if strings[_MARK] == FORMATS[1] or (strings[_MARK] == FORMATS[2] and "shares" in strings):
        wanted = "a weight of each network that predicts; all views have 1 together"
        shares = _value(strings, "shares", are_shares, wanted)
    return KeptModels(
        run=_value(strings, _RUN, *_TEXT) if _RUN in strings else "",
        seen=tuple(sorted(set(_value(strings, "classes_met", *labels)))),
        class_names=tuple(told.pop("class_names")),
        answers={name: tuple(sorted(set(found))) for name, found in answers.items()},
        weights={},
        mirrored=tuple(mirrored),
        shares=shares,
        **_taken(strings),
        **told,
    )


def _value(strings: Mapping[str, Any], name: str, is_right: Callable[[Any], bool], wanted: str) -> Any:
    text = strings.get(name)
    if not isinstance(text, str):
        raise ModelError(f"its metadata lacks {name}")
    try:
        value = text if name in (*_TEXTS, _RUN) else json.loads(text)
    except (RecursionError, ValueError) as fault:
        raise _wrong(name, text, "JSON") from fault
    if not is_right(value):
        raise _wrong(name, value, wanted)
    return value


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
    if kept.network not in NETWORKS and not kept.network.startswith(TIMM):
        return  # another package's may not permit it; it is compared when it is filled
    blueprint = Blueprint(len(kept.class_names), kept.form.shape, kept.width, kept.stem)
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
