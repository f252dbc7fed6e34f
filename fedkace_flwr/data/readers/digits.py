"""The data sets that come with scikit-learn: pictures of scanned digits, and a table of wines."""

from functools import partial

import numpy as np

from fedkace_flwr.data.readers.source import Content, Origin, digest, resized
from fedkace_flwr.sections import DataConfig


def find_digits(config: DataConfig, size: int) -> Origin:
    """scikit-learn's 1797 scanned digits of 8x8 pixels, with three equal channels.

    There is no official split: every fifth image of each class, in the data set's order, is a test image.
    """
    return Origin(digest("bundled with scikit-learn"), partial(_read_digits, size))


def find_wine(config: DataConfig, size: int) -> Origin:
    """scikit-learn's table of 178 wines of three growers with 13 measurements each; there is no test part."""
    return Origin(digest("wine bundled with scikit-learn"), _read_wine, shape=(13,))


def _read_digits(size: int) -> Content:
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[:, None], 3, axis=1)
    labels = np.asarray(digits.target, dtype=np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    order = np.argsort(test, kind="stable")
    return Content(
        class_names=tuple(str(name) for name in digits.target_names),
        labels=labels[order],
        train_size=int((~test).sum()),
        blocks=resized(images[order], size),
    )


def _read_wine() -> Content:
    from sklearn.datasets import load_wine

    wine = load_wine()
    return Content(
        class_names=tuple(str(name) for name in wine.target_names),
        labels=wine.target.astype(np.int64),
        train_size=len(wine.target),
        blocks=iter([wine.data.astype(np.float32)]),
    )
