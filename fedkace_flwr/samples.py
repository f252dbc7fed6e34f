"""Labelled samples: a chunk, a buffer, or the candidates for the next buffer.

Samples are held either by id into a shared array (in a simulation, eight bytes each) or by pixel (on a device). Code
above this module works with both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

Fetch = Callable[[Tensor], Tensor]
"""Map ids, int64 (n,), to images, uint8 (n, 3, H, W)."""


@dataclass(frozen=True)
class Samples:
    """n labelled samples.

    Attributes
    ----------
    content : Tensor
        Ids, int64 (n,), or pixels, uint8 (n, 3, H, W).
    labels : Tensor
        int64 (n,).
    rounds : Tensor
        int64 (n,): the round in which each sample arrived.
    """

    content: Tensor
    labels: Tensor
    rounds: Tensor

    @classmethod
    def none(cls, pixels_of: tuple[int, int, int] | None = None) -> Self:
        """No samples, by id; by pixel if the image shape (3, H, W) is given."""
        empty = torch.empty(0, dtype=torch.int64)
        content = empty if pixels_of is None else torch.empty((0, *pixels_of), dtype=torch.uint8)
        return cls(content, empty, empty)

    @classmethod
    def arrived(cls, content: Tensor, labels: Tensor, round_number: int) -> Self:
        """Samples that all arrived in one round."""
        return cls(content, labels, torch.full_like(labels, round_number))

    @property
    def by_id(self) -> bool:
        """Whether the content is ids rather than pixels."""
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
        """Pixels, uint8 (n, 3, H, W); ``fetch`` is called only for samples held by id."""
        return fetch(self.content) if self.by_id else self.content

    def class_counts(self, num_classes: int) -> Tensor:
        """Number of samples of each class, int64 (C,)."""
        return torch.bincount(self.labels, minlength=num_classes)
