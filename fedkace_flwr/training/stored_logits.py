"""Logits that are stored with a buffer, and the loss that holds a network to them.

Dark experience replay (Buzzega et al., 2020, "Dark Experience for General Continual Learning"). Shapes: n samples,
p stored rows, C classes, B samples of a batch.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedkace_flwr.samples import Samples
from fedkace_flwr.training.losses import Batch, Objective

_KIND = "stored-logits."


@dataclass(frozen=True)
class StoredLogits:
    """Logits of samples when they arrived.

    Attributes
    ----------
    samples : Tensor
        int64 (p,): an id or a digest of each sample.
    logits : Tensor
        Float32 (p, C).
    known : Tensor
        bool (p, C): the classes that the client had met when the logits were stored.
    """

    samples: Tensor
    logits: Tensor
    known: Tensor

    @classmethod
    def none(cls, classes: int) -> Self:
        """No rows, for so many classes."""
        known = torch.empty((0, classes), dtype=torch.bool)
        return cls(torch.empty(0, dtype=torch.int64), torch.empty((0, classes)), known)

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], classes: int) -> Self:
        """Undo :meth:`tensors`; other names are ignored."""
        if f"{_KIND}samples" not in tensors:
            return cls.none(classes)
        return cls(*(tensors[f"{_KIND}{name}"] for name in cls.__dataclass_fields__))

    def tensors(self) -> dict[str, Tensor]:
        """The rows as tensors of a client's state."""
        return {f"{_KIND}{name}": getattr(self, name) for name in self.__dataclass_fields__}

    def to(self, device: torch.device) -> Self:
        """The same rows on a device."""
        return type(self)(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def of(self, samples: Samples) -> Self:
        """The rows of samples, in their order; the row of a sample without logits knows no class."""
        keys, classes = identities(samples), self.logits.shape[1]
        places = {int(key): row for row, key in enumerate(self.samples)}
        rows = torch.tensor([places.get(int(key), len(places)) for key in keys], dtype=torch.int64)
        logits = torch.cat([self.logits, torch.zeros(1, classes)])
        known = torch.cat([self.known, torch.zeros(1, classes, dtype=torch.bool)])
        return type(self)(keys, logits[rows], known[rows])

    def joined_by(self, samples: Samples, logits: Tensor, seen: Tensor) -> Self:
        """These rows and those of new samples: their logits, float (n, C), and the classes met, bool (C,)."""
        return type(self)(
            torch.cat([self.samples, identities(samples)]),
            torch.cat([self.logits, logits]),
            torch.cat([self.known, seen.expand(len(samples), -1)]),
        )


def identities(samples: Samples) -> Tensor:
    """An id for each sample, int64 (n,): its own, or a digest of its pixels and label."""
    if samples.by_id:
        return samples.content
    found = []
    for pixels, label in zip(samples.content, samples.labels, strict=True):
        digest = hashlib.blake2b(pixels.contiguous().numpy().tobytes(), digest_size=7)
        digest.update(int(label).to_bytes(8, "little"))
        found.append(int.from_bytes(digest.digest(), "little"))
    return torch.tensor(found, dtype=torch.int64)


class StoredLogitsLoss:
    """Another loss plus a weight times the mean squared distance of replayed samples' logits from the stored ones.

    Each sample's distance is the mean over the classes that were known when its logits were stored.

    Parameters
    ----------
    objective : Objective
        The other loss.
    stored : StoredLogits
        The rows of the buffer's samples, in their order, on the device of the logits.
    weight : float
        The weight.
    chunk : int
        Number of the chunk's samples, whose positions come before those of the buffer.
    """

    def __init__(self, objective: Objective, stored: StoredLogits, weight: float, chunk: int) -> None:
        self._objective = objective
        self._logits, self._known = stored.logits, stored.known
        self._weight, self._chunk = weight, chunk

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        """Prepare the other loss."""
        self._objective.begin_epoch(task_draws, replay_draws)

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Scalar; logits (B, C)."""
        rows = (batch.positions - self._chunk).clamp_min(0)
        known = self._known[rows] & batch.replayed.unsqueeze(1)
        squares = (logits - self._logits[rows]).square() * known
        distances = squares.sum(dim=1) / known.sum(dim=1).clamp_min(1)
        drawn = distances.sum() / known.any(dim=1).sum().clamp_min(1)
        return self._objective.loss(logits, features, batch) + self._weight * drawn

    def end_epoch(self) -> None:
        """Conclude the other loss."""
        self._objective.end_epoch()
