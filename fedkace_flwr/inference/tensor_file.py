"""A model in one file of safetensors: the tensors that predicting needs, and how to use them, as plain strings.

The file of one network holds its state dict under its own names; where several networks predict together, each name
begins with the network's. The same model always makes the same bytes. :mod:`fedkace_flwr.inference.reading` reads it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from fedkace_flwr.errors import ModelError
from fedkace_flwr.inference.kept_models import KeptModels

FORMATS = ("1", "2")
"""Versions of what a file says about its tensors: the second has ``shares``, and is written for models that have them."""

MARK, METADATA = "fedkace_flwr", "__metadata__"
"""Names in the file's header: of the format's version, and of all strings."""

RUN, CHECKSUM = "run", "sha256"
"""Names of strings that only a client's file has: of its run, and of the SHA-256 of all else in the file."""

TEXTS = ("method", "network", "stem", "precision", "scaling", "combined")
"""What is written as it is; the rest as JSON."""

_LENGTH_BYTES, _ALIGNED = 8, 8
_LARGEST_HEADER = 2**25
_LEAST_STD = 1 / 255  # below it, preprocessing takes this value


def described(kept: KeptModels) -> dict[str, Any]:
    """What the file says about its tensors, as values ready for JSON; :func:`pack` writes each as a string."""
    red, green, blue = (max(value, _LEAST_STD) for value in kept.std)
    return {
        "method": kept.method,
        "network": kept.network,
        "width": kept.width,
        "stem": kept.stem,
        "precision": kept.precision,
        "image_size": kept.framing.size,
        "shorter_side": kept.framing.shorter,
        "scaling": kept.framing.scaling,
        "mean": list(kept.mean),
        "std": [red, green, blue],
        "class_names": list(kept.class_names),
        "classes_met": list(kept.seen),
        "answers": {name: list(classes) for name, classes in kept.answers.items()},
        "combined": kept.combined,
        "mirrored": list(kept.mirrored),
        **({"shares": dict(kept.shares)} if kept.shares else {}),
        "round": kept.round,
        "trained": kept.trained,
        "switched_at": kept.switched_at,
    }


def format_of(kept: KeptModels) -> str:
    """The oldest format that can describe a model."""
    return FORMATS[bool(kept.shares)]


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
    strings = {name: value if name in TEXTS else json.dumps(value) for name, value in described(kept).items()}
    content = safetensors.numpy.save(arrays)
    header, start = header_of(content)
    strings = {"format": "pt", MARK: format_of(kept), **strings}
    if stored:
        strings[RUN] = kept.run
        strings[CHECKSUM] = checksum(strings, header, content[start:])
    header = {METADATA: strings, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + content[start:]


def checksum(strings: Mapping[str, Any], header: Mapping[str, Any], tensors: bytes) -> str:
    """SHA-256 of a file's strings but the checksum, of what its header says about the tensors, and of these."""
    told = [{**strings, CHECKSUM: ""}, {**header, METADATA: ""}]
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    found.update(tensors)
    return found.hexdigest()


def header_of(content: bytes) -> tuple[dict[str, Any], int]:
    """What a file of safetensors says before its tensors, and where these begin.

    Raises
    ------
    ModelError
        It is no such file.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if len(content) < _LENGTH_BYTES or end > len(content) or length > _LARGEST_HEADER:
        raise ModelError("it is damaged, or no file of safetensors")
    try:
        header = json.loads(content[_LENGTH_BYTES:end])
    except (RecursionError, ValueError) as fault:
        raise ModelError("it is damaged, or no file of safetensors") from fault
    if not isinstance(header, dict):
        raise ModelError("it is damaged, or no file of safetensors")
    return header, end
