"""Inboxes whose samples can be told apart."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedkace_flwr.data.inbox import Inbox
from fedkace_flwr.samples import Form

CLASSES = ("a", "b", "c")
SIZE = 2
FORM = Form.picture(SIZE)
RUN = "00000000000000000007"


def drop(folder: Path, name: str, *numbers: int) -> None:
    """Write one file; the first pixel of a sample is its number."""
    pixels = np.zeros((len(numbers), SIZE, SIZE, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = numbers
    (folder / "new").mkdir(parents=True, exist_ok=True)
    np.savez(folder / "new" / name, images=pixels, labels=np.array(numbers) % 3)


def picture(path: Path) -> None:
    """Write a picture of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (SIZE, SIZE), (3, 0, 0)).save(path, "PNG")


def opened(folder: Path, run: str = RUN, class_names: tuple[str, ...] = CLASSES, **settings: Any) -> Inbox:
    return Inbox(folder, run, class_names, **{"form": FORM, "bound": 100, **settings})


def numbers_of(arrived: tuple[np.ndarray, np.ndarray]) -> list[int]:
    numbers = arrived[0].reshape(len(arrived[1]), -1)[:, 0] if len(arrived[1]) else arrived[1]
    assert (numbers % 3 == arrived[1]).all()
    return numbers.astype(int).tolist()


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
