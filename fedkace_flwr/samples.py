"""Labelled samples: a chunk, a buffer, or the candidates for the next buffer.

A sample is a picture or an array of numbers (:class:`Form`). Samples are held either by id into a shared array (in a
simulation, eight bytes each) or by value (on a device). Code above this module works with both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

Fetch = Callable[[Tensor], Tensor]
"""Map ids, int64 (n,), to samples, uint8 (n, 3, H, W) or float32 (n, ...)."""


@dataclass(frozen=True)
class Form:
    """What each sample of a data set is.

    Attributes
    ----------
    dtype : dtype
        Of its values: uint8 of a picture, float32 of any other array.
    shape : tuple of int
        Of one sample.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def picture(cls, size: int) -> "Form":
        """A colour picture with values from 0 to 255."""
        return cls(np.dtype(np.uint8), (3, size, size))

    @classmethod
    def array(cls, *shape: int) -> "Form":
        """An array of numbers: a table's row (features,), a series (channels, length), or of any other shape."""
        return cls(np.dtype(np.float32), shape)

    @property
    def is_picture(self) -> bool:
        """Whether it is a picture."""
        return self.dtype == np.uint8

    @property
    def size(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Samples:
    """n labelled samples.

    Attributes
    ----------
    content : Tensor
        Ids, int64 (n,), or values, uint8 (n, 3, H, W) or float32 (n, ...).
    labels : Tensor
        int64 (n,).
    rounds : Tensor
        int64 (n,): the round in which each sample arrived.
    """

    content: Tensor
    labels: Tensor
    rounds: Tensor

    @classmethod
    def none(cls, form: Form | None = None) -> Self:
        """No samples, by id; by value if their form is given."""
        empty = torch.empty(0, dtype=torch.int64)
        content = empty if form is None else torch.from_numpy(np.empty((0, *form.shape), dtype=form.dtype))
        return cls(content, empty, empty)

    @classmethod
    def arrived(cls, content: Tensor, labels: Tensor, round_number: int) -> Self:
        """Samples that all arrived in one round."""
        return cls(content, labels, torch.full_like(labels, round_number))

    @property
    def by_id(self) -> bool:
        """Whether the content is ids rather than values."""
        return self.content.dtype == torch.int64

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, positions: Tensor) -> Self:
        """The samples at the given positions, int64 (k,)."""
        return type(self)(self.content[positions], self.labels[positions], self.rounds[positions])

    def followed_by(self, other: "Samples") -> Self:
        """These samples, then the other ones."""
        return type(self)(
            torch.cat([self.content, other.content]),
            torch.cat([self.labels, other.labels]),
            torch.cat([self.rounds, other.rounds]),
        )

    def images(self, fetch: Fetch) -> Tensor:
        """Values, uint8 (n, 3, H, W) or float32 (n, ...); ``fetch`` is called only for samples held by id."""
        return fetch(self.content) if self.by_id else self.content

    def class_counts(self, num_classes: int) -> Tensor:
        """Number of samples of each class, int64 (C,)."""
        return torch.bincount(self.labels, minlength=num_classes)
