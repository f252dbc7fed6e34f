"""A folder with a model: ``model.safetensors``, a description for other programs, a card, and on request ONNX.

``model.safetensors`` alone is read back. ``config.json`` repeats what it says about its tensors, for people and for
programs that do not read its metadata.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import fedkace_flwr
from fedkace_flwr.export.card import Training, card, with_onnx
from fedkace_flwr.inference.kept_models import TENSORS, KeptModels
from fedkace_flwr.inference.tensor_file import described, format_of, pack
from fedkace_flwr.networks.lora import DOWN, UP
from fedkace_flwr.storage import files
from fedkace_flwr.storage.atomic import Array
from fedkace_flwr.storage.targets import renewed

DESCRIPTION, CARD, ONNX, ADAPTERS = "config.json", "README.md", "model.onnx", "adapters.safetensors"
"""The files of a folder, beside that of the tensors."""

HOLDS = "a model"
"""What such a folder's mark says."""


def write_folder(
    folder: Path,
    kept: KeptModels,
    training: Training | None = None,
    *,
    text: str | None = None,
    onnx: bytes = b"",
    adapters: bytes = b"",
) -> None:
    """Write a model's folder; of an earlier model in it nothing is left.

    Parameters
    ----------
    folder : Path
        New, made for its owner alone; empty; or written by this function.
    kept : KeptModels
        The model.
    training : Training, optional
        The run that it comes from, for the card.
    text : str, optional
        A card to use in place of one that is made here.
    onnx : bytes, optional
        Content of ``model.onnx``; without it there is none.
    adapters : bytes, optional
        Content of ``adapters.safetensors``, which :func:`packed_adapters` makes; without it there is none.

    Raises
    ------
    ConfigError
        The folder holds something else, or cannot be written.
    OSError
        The system refuses; the folder is as before.
    """
    told = card(kept, training, onnx=bool(onnx)) if text is None else with_onnx(text, kept, onnx=bool(onnx))
    with renewed(folder, HOLDS) as new:
        files.write_bytes(new / TENSORS, pack(kept))
        files.write_text(new / DESCRIPTION, json.dumps(_description(kept), indent=2, allow_nan=False) + "\n")
        files.write_text(new / CARD, told)
        if onnx:
            files.write_bytes(new / ONNX, onnx)
        if adapters:
            files.write_bytes(new / ADAPTERS, adapters)


def packed_adapters(weights: Mapping[str, Array]) -> bytes:
    """A file of a model's adapters alone, to start from (``weights-file``); empty if there are none."""
    found = {name: np.require(array, requirements="C") for name, array in weights.items() if name.endswith((DOWN, UP))}
    return safetensors.numpy.save(found) if found else b""


def _description(kept: KeptModels) -> dict[str, Any]:
    told = described(kept)
    names = told.pop("class_names")
    return {
        "library_name": "fedkace-flwr",
        "version": fedkace_flwr.__version__,
        "format": int(format_of(kept)),
        **told,
        "id2label": {str(label): name for label, name in enumerate(names)},
    }
