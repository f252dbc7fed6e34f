"""Files of untrained models, each of which predicts the same class for every image."""

import io
import json
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image

from fedkace_flwr.data.images import Framing
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference import kept_models as serving
from fedkace_flwr.inference.kept_models import KeptModels
from fedkace_flwr.inference.tensor_file import pack
from fedkace_flwr.storage.atomic import header_of
from support.made.networks import seeded_resnet18

CLASSES = 10


def constant(round_number: int, label: int, seen: tuple[int, ...] = tuple(range(CLASSES)), **changes: object):  # type: ignore[no-untyped-def]
    """Return a generation whose global model predicts ``label``."""
    net = seeded_resnet18(CLASSES, 2, "cifar", seed=round_number)
    with torch.no_grad():
        net.output.weight.zero_()
        net.output.bias.copy_(torch.arange(CLASSES) * 0.1)
        net.output.bias[label] = 5.0
    content: dict[str, Any] = {
        "method": "fedkace",
        "run": "made",
        "round": round_number,
        "trained": round_number,
        "switched_at": 1,
        "seen": seen,
        "class_names": tuple(f"class {number}" for number in range(CLASSES)),
        "framing": Framing.of_arrays(8),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
        "width": 2,
        "stem": "cifar",
        "precision": "float32",
        "answers": {serving.GLOBAL: seen},
        "weights": {serving.GLOBAL: as_arrays(net.state_dict())},
    }
    return KeptModels(**{**content, **changes})


def changed(kept: KeptModels, **strings: str | None) -> bytes:
    """Return a model's file with other metadata, or without some."""
    content = pack(kept)
    header, start = header_of(content)
    told = {**header["__metadata__"], **strings}
    header["__metadata__"] = {name: text for name, text in told.items() if text is not None}
    return with_header(header, content[start:])


def with_header(header: object, tensors: bytes) -> bytes:
    """Return a file of safetensors."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + tensors


def picture(kind: str = "PNG", size: tuple[int, int] = (30, 20), mode: str = "RGB", seed: int = 0) -> bytes:
    """Return a noise image as the bytes of a file."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, kind)
    return file.getvalue()


def blank(width: int, height: int, mode: str = "1", orientation: int = 1) -> bytes:
    """Return a black image, a file of few bytes."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.new(mode, (width, height)).save(file, "PNG", exif=exif)
    return file.getvalue()
