"""One training step, and the samples that steps draw from.

Shapes: n samples of a pool, B samples of a batch, H and W image height and width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkace_flwr.networks.network import Network
from fedkace_flwr.training.augmentation import FlipShift
from fedkace_flwr.training.losses import Batch, Objective
from fedkace_flwr.training.optimisers import Optimiser


@dataclass(frozen=True)
class Pool:
    """The samples of a round, resident on the device.

    Attributes
    ----------
    images : Tensor
        uint8 (n, H, W, 3), or for arrays of other than three dimensions (n, ...): the chunk's, followed by the buffer's.
    labels : Tensor
        int64 (n,).
    replayed : Tensor
        bool (n,): whether the sample is from the buffer.
    preprocess : callable
        Maps samples, such as uint8 (B, 3, H, W), to normalised float of the same shape.
    augment : FlipShift, optional
        Changes the images of a batch.
    adjustment : Tensor, optional
        As in :class:`~fedkace_flwr.training.losses.Batch`.
    """

    images: Tensor
    labels: Tensor
    replayed: Tensor
    preprocess: Callable[[Tensor], Tensor]
    augment: FlipShift | None = None
    adjustment: Tensor | None = None

    def batch(self, positions: Tensor) -> Batch:
        """Gather samples by position, int64 on the device, of any shape; samples always have shape (B, ...)."""
        flat = positions.flatten()
        images = self.images.index_select(0, flat) if self.augment is None else self.augment(self.images, flat)
        images = self.preprocess(images.permute(0, 3, 1, 2) if images.dim() == 4 else images)
        return Batch(images, self.labels[positions], self.replayed[positions], positions, self.adjustment)


def take_step(net: Network, pool: Pool, objective: Objective, optimiser: Optimiser, positions: Tensor) -> Tensor:
    """Forward, backward and update on the samples at ``positions``, int64 (B,); return the detached scalar loss."""
    batch = pool.batch(positions)
    features = net.features(batch.images)
    loss = objective.loss(net.output(features), features, batch)
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    optimiser.step()
    return loss.detach()
