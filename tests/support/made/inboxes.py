"""Inboxes whose samples can be told apart."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedkace_flwr.data.inbox import Inbox

CLASSES = ("a", "b", "c")
SIZE = 2
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
    return Inbox(folder, run, class_names, SIZE, **{"bound": 100, **settings})


def numbers_of(arrived: tuple[np.ndarray, np.ndarray]) -> list[int]:
    assert (arrived[0][:, 0, 0, 0] % 3 == arrived[1]).all()
    return arrived[0][:, 0, 0, 0].tolist()


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
