"""The one local training loop and the one prediction loop.

Images are gathered from a resident uint8 array and normalised batch by batch in channels-last order; there
are no loader processes. Shapes: n images, B batch, H and W height and width, C classes, F features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkace_flwr.batches import EPOCHS
from fedkace_flwr.config import TrainingConfig
from fedkace_flwr.errors import RunError
from fedkace_flwr.model import ResNet18
from fedkace_flwr.objectives import Batch, Objective

_PREDICTION_BATCH = 128


@dataclass(frozen=True)
class Preprocess:
    """Turn uint8 images into normalised floats on a device, channels-last.

    Attributes
    ----------
    scale, shift : Tensor
        Float (1, 3, 1, 1) on the device; an image becomes ``image * scale + shift``.
    """

    scale: Tensor
    shift: Tensor

    @classmethod
    def by_statistics(
        cls, mean: tuple[float, float, float], std: tuple[float, float, float], device: torch.device
    ) -> "Preprocess":
        """Subtract ``mean`` and divide by ``std``, both of images scaled to [0, 1]."""
        centre, spread = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (mean, std))
        spread = spread.clamp_min(1 / 255)
        return cls((1 / (255 * spread)).float().to(device), (-centre / spread).float().to(device))

    def __call__(self, images: Tensor) -> Tensor:
        """Map uint8 (B, 3, H, W) to float (B, 3, H, W)."""
        x = images.to(self.scale.device, torch.float32, memory_format=torch.channels_last)
        return x.mul_(self.scale).add_(self.shift)


def train(
    net: ResNet18,
    chunk: tuple[Tensor, Tensor],
    buffer: tuple[Tensor, Tensor],
    objective: Objective,
    settings: TrainingConfig,
    preprocess: Preprocess,
    generator: torch.Generator,
    *,
    optimiser: torch.optim.Optimizer | None = None,
    epochs: range | None = None,
    after_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train ``net`` in place on chunk and buffer for one round (paper, section A.3).

    A fresh AdamW; its learning rate falls from the first epoch's to 0 along a cosine over the epochs.

    Parameters
    ----------
    net : ResNet18
        On the device of ``preprocess``.
    chunk, buffer : tuple of Tensor
        Images, uint8 (n, 3, H, W), and labels, int64 (n,). The buffer may be empty.
    objective : Objective
        The loss.
    settings : TrainingConfig
        Epochs, batch size, learning rate, weight decay and batching.
    preprocess : Preprocess
        Normalisation and device.
    generator : torch.Generator
        CPU generator that orders the samples.
    optimiser : Optimizer, optional
        What to go on with, made by :func:`adamw`, where training happens in parts.
    epochs : range, optional
        Which of the epochs to run, from 0; the learning rate is the one that they have among all. By default all.
    after_step : callable, optional
        Called after each step with the epoch's number, from 1, and the share of its steps that are done.

    Raises
    ------
    RunError
        The loss of an epoch is not finite.
    """
    device = preprocess.scale.device
    pool = torch.cat([chunk[0], buffer[0]]).permute(0, 2, 3, 1).contiguous().to(device)
    labels = torch.cat([chunk[1], buffer[1]]).to(device)
    replayed = torch.arange(len(labels), device=device) >= len(chunk[1])
    optimiser = optimiser or adamw(net, settings)
    epochs = range(settings.epochs) if epochs is None else epochs
    rate = settings.learning_rate
    for group in optimiser.param_groups:
        group["initial_lr"], group["lr"] = rate, rate * (1 + math.cos(math.pi * epochs.start / settings.epochs)) / 2
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=settings.epochs, last_epoch=epochs.start - 1)
    net.train()
    for number in range(epochs.start + 1, epochs.stop + 1):
        epoch = EPOCHS[settings.batching](len(chunk[1]), len(buffer[1]), settings.batch_size, generator)
        objective.begin_epoch(epoch.task_draws, epoch.replay_draws)
        total = torch.zeros((), device=device)
        for step, order in enumerate(epoch.batches, start=1):
            positions = order.to(device)
            images = preprocess(pool.index_select(0, positions).permute(0, 3, 1, 2))
            batch = Batch(images, labels[positions], replayed[positions], positions)
            features = net.features(batch.images)
            loss = objective.loss(net.output(features), features, batch)
            optimiser.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimiser.step()
            if after_step is not None:
                after_step(number, step / len(epoch.batches))
            total += loss.detach()
        schedule.step()
        objective.end_epoch()
        if not math.isfinite(float(total)):
            raise RunError(
                f"epoch {number}: the training loss is not finite; try a learning-rate below {settings.learning_rate:g}"
            )


def adamw(net: ResNet18, settings: TrainingConfig) -> torch.optim.AdamW:
    """The optimiser of local training, at the first epoch's learning rate."""
    return torch.optim.AdamW(
        net.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )


@torch.inference_mode()
def predict(net: ResNet18, images_of: Callable[[Tensor], Tensor], content: Tensor, preprocess: Preprocess) -> Tensor:
    """Logits of images in evaluation mode, fetched block by block.

    Parameters
    ----------
    net : ResNet18
        On the device of ``preprocess``; left in evaluation mode.
    images_of : callable
        Maps a slice of ``content`` to uint8 (n, 3, H, W).
    content : Tensor
        What to fetch, (n, ...).
    preprocess : Preprocess
        Normalisation and device.

    Returns
    -------
    Tensor
        float32 (n, C) on the CPU.
    """
    net.eval()
    if not len(content):
        return torch.empty((0, net.output.out_features))
    blocks = [net(preprocess(images_of(block))).cpu() for block in torch.split(content, _PREDICTION_BATCH)]
    return torch.cat(blocks)
