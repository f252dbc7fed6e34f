"""Generated data sets of arrays: tables and series of four classes."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TABLE, SERIES = (5,), (3, 12)
NETWORK = {TABLE: "mlp", SERIES: "cnn1d"}
CLASSES = 4


def arrays(shape: tuple[int, ...], train: int = 60, test: int = 15) -> dict[str, NDArray[Any]]:
    """Return samples of each class around a centre of its own, in units of their own, and their labels."""
    generator = np.random.default_rng(3)
    centres = generator.normal(size=(CLASSES, *shape))
    made: dict[str, NDArray[Any]] = {}
    for part, count in (("train", train), ("test", test)):
        labels = np.repeat(np.arange(CLASSES), count)
        values = centres[labels] + 0.3 * generator.normal(size=(len(labels), *shape))
        made[f"x_{part}"] = (100 + 20 * values).astype(np.float32)
        made[f"y_{part}"] = labels
    return made


def write_arrays(folder: Path, shape: tuple[int, ...], **changes: NDArray[Any] | None) -> Path:
    """Write them to ``data.npz`` in a folder, with some replaced or, if None, left out."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: array for name, array in (arrays(shape) | changes).items() if array is not None}
    np.savez(folder / "data.npz", **content)  # type: ignore[arg-type]
    return folder
