"""Random candidates for a buffer."""

import numpy as np
import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mask_of(classes: list[int], size: int) -> Tensor:
    return torch.tensor([label in classes for label in range(size)])


class Case:
    """Random candidates: m of old classes, then a chunk of old and new classes; ``spare`` classes are never met."""

    def __init__(self, seed: int, m: int, chunk: int, active: int, spare: int = 2, spread: float = 2.0) -> None:
        rng = np.random.default_rng(seed)
        total = active + spare
        classes = rng.permutation(total)[:active]
        old = classes[: int(rng.integers(1, active + 1))] if m else classes[:0]
        self.m = m
        self.logits = rng.normal(size=(m + chunk, total)) * spread
        self.labels = np.concatenate([rng.choice(old, m) if m else np.empty(0, int), rng.choice(classes, chunk)])
        self.old_classes, self.active_classes = sorted(old.tolist()), sorted(classes.tolist())
        self.old, self.active = mask_of(self.old_classes, total), mask_of(self.active_classes, total)

    def tensors(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
        return torch.from_numpy(self.logits), torch.from_numpy(self.labels).long(), self.m, self.old, self.active
