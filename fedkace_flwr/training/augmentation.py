"""Random changes of training images.

Each epoch draws one change for every sample of a round; a step only looks them up, so that it can be recorded.
Shapes: n samples, B samples of a batch, H and W image height and width.
"""

import torch
from torch import Tensor

_LARGEST_SHIFT = 1 / 8  # of a side


class FlipShift:
    """Mirrors half of the images, and shifts each by up to an eighth of its side, repeating its edge.

    Parameters
    ----------
    samples : int
        n.
    height, width : int
        H and W.
    device : torch.device
        Where the images are.
    generator : torch.Generator
        CPU generator of the changes.
    room : int
        Number of samples to make room for, at least n; by default n.
    """

    unread_by_steps = ("_generator", "_samples")

    def __init__(
        self,
        samples: int,
        height: int,
        width: int,
        device: torch.device,
        generator: torch.Generator,
        *,
        room: int | None = None,
    ) -> None:
        self._generator = generator
        self._samples = samples
        self._reach = (int(height * _LARGEST_SHIFT), int(width * _LARGEST_SHIFT))
        # Changed in place from epoch to epoch: for each sample, the row and column of each pixel of its changed image.
        self._rows = torch.arange(height, device=device).repeat(room or samples, 1)
        self._columns = torch.arange(width, device=device).repeat(room or samples, 1)

    def draw(self) -> None:
        """Draw the changes of the next epoch."""
        samples = self._samples
        flipped = torch.rand(samples, 1, generator=self._generator) < 0.5
        for index, reach, mirrored in ((self._rows, self._reach[0], None), (self._columns, self._reach[1], flipped)):
            size = index.shape[1]
            shift = torch.randint(-reach, reach + 1, (samples, 1), generator=self._generator)
            places = (torch.arange(size) + shift).clamp(0, size - 1)
            if mirrored is not None:
                places = torch.where(mirrored, size - 1 - places, places)
            index[:samples].copy_(places)

    def __call__(self, images: Tensor, positions: Tensor) -> Tensor:
        """Change images of a batch.

        Parameters
        ----------
        images : Tensor
            uint8 (n, H, W, 3), all samples of the round.
        positions : Tensor
            int64 (B,), the samples of the batch.

        Returns
        -------
        Tensor
            uint8 (B, H, W, 3).
        """
        rows, columns = self._rows[positions], self._columns[positions]
        return images[positions[:, None, None], rows[:, :, None], columns[:, None, :]]
