"""A folder with a model: ``model.safetensors``, a description for other programs, a card, and on request ONNX.

``model.safetensors`` alone is read back. ``config.json`` repeats what it says about its tensors, for people and for
programs that do not read its metadata.
"""

import json
import os
from pathlib import Path
from typing import Any

import fedkace_flwr
from fedkace_flwr.errors import ModelError
from fedkace_flwr.export.card import Training, card, with_onnx
from fedkace_flwr.inference.kept_models import TENSORS, KeptModels
from fedkace_flwr.inference.tensor_file import described, format_of, pack
from fedkace_flwr.storage import files
from fedkace_flwr.storage.folders import make_folder

DESCRIPTION, CARD, ONNX = "config.json", "README.md", "model.onnx"
"""The files of a folder, beside that of the tensors."""


def write_folder(
    folder: Path, kept: KeptModels, training: Training | None = None, *, text: str | None = None, onnx: bytes = b""
) -> None:
    """Write a model's folder; of an earlier model in it nothing is left.

    Each file is replaced as a whole. Whenever this is interrupted, ``model.safetensors`` is the old or the new model,
    and there is no ``model.onnx`` of another one.

    Parameters
    ----------
    folder : Path
        Made for its owner alone if it does not exist.
    kept : KeptModels
        The model.
    training : Training, optional
        The run that it comes from, for the card.
    text : str, optional
        A card to use in place of one that is made here.
    onnx : bytes, optional
        Content of ``model.onnx``; without it there is none.

    Raises
    ------
    OSError
        The system refuses.
    """
    make_folder(folder)
    (folder / ONNX).unlink(missing_ok=True)
    files.write_bytes(folder / TENSORS, pack(kept))
    files.write_text(folder / DESCRIPTION, json.dumps(_description(kept), indent=2, allow_nan=False) + "\n")
    told = card(kept, training, onnx=bool(onnx)) if text is None else with_onnx(text, onnx=bool(onnx))
    files.write_text(folder / CARD, told)
    if onnx:
        files.write_bytes(folder / ONNX, onnx)


def check_target(folder: Path) -> None:
    """Check that a model may be written to a folder: it is new or empty, or holds a model already.

    Raises
    ------
    ModelError
        It holds something else.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / TENSORS).exists()):
        raise ModelError(f"{folder}: must be a new or an empty folder, or that of a model, which is replaced")


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
