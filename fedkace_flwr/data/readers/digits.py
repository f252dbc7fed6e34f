"""The data sets that come with scikit-learn: scanned digits, as pictures or as series, and a table of wines."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data.readers.source import Content, Origin, digest, resized
from fedkace_flwr.sections import DataConfig


def find_digits(config: DataConfig, size: int) -> Origin:
    """scikit-learn's 1797 scanned digits of 8x8 pixels, with three equal channels.

    There is no official split: every fifth image of each class, in the data set's order, is a test image.
    """
    return Origin(digest("bundled with scikit-learn"), partial(_read_digits, size))


def find_digit_lines(config: DataConfig, size: int) -> Origin:
    """The same digits as a scanner reads them: series of eight lines (steps) with eight values (channels) each."""
    return Origin(digest("digit lines bundled with scikit-learn"), _read_digit_lines, shape=(8, 8))


def find_wine(config: DataConfig, size: int) -> Origin:
    """scikit-learn's table of 178 wines of three growers with 13 measurements each; there is no test part."""
    return Origin(digest("wine bundled with scikit-learn"), _read_wine, shape=(13,))


def _read_digits(size: int) -> Content:
    pixels, labels, train_size = _digits()
    grey = np.rint(pixels * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[:, None], 3, axis=1)
    return _content(range(10), labels, train_size, resized(images, size))


def _read_digit_lines() -> Content:
    pixels, labels, train_size = _digits()
    lines = np.ascontiguousarray(pixels.transpose(0, 2, 1), dtype=np.float32)  # a channel is a column of the picture
    return _content(range(10), labels, train_size, iter([lines]))


def _read_wine() -> Content:
    from sklearn.datasets import load_wine

    wine = load_wine()
    return _content(wine.target_names, wine.target, len(wine.target), iter([wine.data.astype(np.float32)]))


def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """Pixels from 0 to 16, (N, 8, 8), and labels, the training part first; and its length."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = np.asarray(digits.target, dtype=np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    order = np.argsort(test, kind="stable")
    return digits.images[order], labels[order], int((~test).sum())


def _content(names: Any, labels: NDArray[Any], train_size: int, blocks: Any) -> Content:
    return Content(tuple(str(name) for name in names), np.asarray(labels, dtype=np.int64), train_size, blocks)
