"""The local training loop and the prediction loop.

Samples are gathered from a resident array and normalised batch by batch, pictures in channels-last order, without loader
processes. Shapes: n samples, B batch, H and W height and width, C classes, F features.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedkace_flwr.compute.memory import images_at_once
from fedkace_flwr.errors import RunError
from fedkace_flwr.keys import word_of
from fedkace_flwr.networks.network import Network
from fedkace_flwr.networks.trainable import head_of
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training.augmentation import FlipShift
from fedkace_flwr.training.batches import EPOCHS, Batching, Epoch
from fedkace_flwr.training.cuda_graphs import KeptSteps
from fedkace_flwr.training.losses import Objective
from fedkace_flwr.training.optimisers import Adam, Optimiser, Sgd
from fedkace_flwr.training.steps import Pool, take_step

_FETCHED = 128  # images at a time on a CPU
_CACHED_PIXELS, _FEWEST = 1 << 15, 16  # pixels whose activations fit a processor's cache; fewest images per pass


@dataclass(frozen=True)
class Preprocess:
    """Turns samples into normalised floats on a device, pictures channels-last.

    Attributes
    ----------
    scale, shift : Tensor
        Float on the device, (1, 3, 1, 1), or for other arrays one number along their first dimension; a sample becomes
        ``sample * scale + shift``.
    """

    scale: Tensor
    shift: Tensor

    @classmethod
    def identity(cls, device: torch.device) -> "Preprocess":
        """Change nothing."""
        return cls(torch.ones((), device=device), torch.zeros((), device=device))

    @classmethod
    def by_statistics(
        cls, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, form: Form | None = None
    ) -> "Preprocess":
        """Subtract ``mean`` and divide by ``std``, both of pictures scaled to [0, 1] unless ``form`` is an array's."""
        if form is not None and not form.is_picture:
            across = (1, -1, *(1 for _ in form.shape[1:]))
            centre, spread = (torch.tensor(values, dtype=torch.float64).view(across) for values in (mean, std))
            return cls((1 / spread).float().to(device), (-centre / spread).float().to(device))
        centre, spread = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (mean, std))
        spread = spread.clamp_min(1 / 255)
        return cls((1 / (255 * spread)).float().to(device), (-centre / spread).float().to(device))

    def __call__(self, images: Tensor) -> Tensor:
        """Map uint8 (B, 3, H, W), or float of any shape, to float of the same shape."""
        if images.dim() != 4:
            return images.to(self.scale.device, self.scale.dtype).mul(self.scale).add_(self.shift)
        x = images.to(self.scale.device, self.scale.dtype, memory_format=torch.channels_last)
        return (x.mul(self.scale) if x is images else x.mul_(self.scale)).add_(self.shift)


def train(
    net: Network,
    chunk: tuple[Tensor, Tensor],
    buffer: tuple[Tensor, Tensor],
    objective: Objective,
    settings: TrainingConfig,
    preprocess: Preprocess,
    generator: torch.Generator,
    *,
    batching: Batching | None = None,
    optimiser: Optimiser | None = None,
    epochs: range | None = None,
    after_step: Callable[[int, float], None] | None = None,
    augmentation: torch.Generator | None = None,
    captured: bool = False,
    kept: KeptSteps | None = None,
) -> None:
    """Train ``net`` in place on chunk and buffer for one round (paper, section A.3).

    Where the output layer alone trains and images are not changed, features are computed once, not in each epoch.

    By default with a new optimiser, whose learning rate falls from the first epoch's to 0 along a cosine over the epochs.

    Parameters
    ----------
    net : Network
        On the device of ``preprocess``.
    chunk, buffer : tuple of Tensor
        Samples, uint8 (n, 3, H, W) or float32 (n, ...), and labels, int64 (n,). The buffer may be empty.
    objective : Objective
        The loss.
    settings : TrainingConfig
        Epochs, batch size, optimiser, learning rate, weight decay, batching, augmentation and logit adjustment.
    preprocess : Preprocess
        Normalisation and device.
    generator : torch.Generator
        CPU generator that orders the samples.
    batching : str, optional
        A key of :data:`fedkace_flwr.training.batches.EPOCHS`, in place of the settings'.
    optimiser : Optimiser, optional
        An optimiser of :func:`optimiser_of` to continue with, for training in parts.
    epochs : range, optional
        The epochs to run, from 0, at the learning rates that they have among all epochs. By default all.
    after_step : callable, optional
        Called after each step with the epoch's number, from 1, and the share of its steps that are done.
    augmentation : torch.Generator, optional
        CPU generator of the changes that ``settings.augment`` asks for; needed if it asks for any.
    captured : bool
        Take steps over tensors that stay in place, recorded on CUDA (:mod:`fedkace_flwr.training.cuda_graphs`), unless
        ``optimiser`` or ``after_step`` is given. The results are those of the plain loop.
    kept : KeptSteps, optional
        Steps of earlier trainings in this process; used if ``captured``.

    Raises
    ------
    RunError
        The loss of an epoch is not finite.
    ValueError
        ``settings.augment`` asks for changes, and there is no generator for them.
    """
    device = preprocess.scale.device
    if settings.augment == "none" and (head := head_of(net)) is not None:
        of_once = partial(features_of, net, lambda block: block, preprocess=preprocess)
        chunk, buffer = ((of_once(samples), labels) for samples, labels in (chunk, buffer))
        net, preprocess = head, Preprocess.identity(device)
    static = captured and optimiser is None and after_step is None
    kept = kept or KeptSteps()
    pool = pool_of(chunk, buffer, preprocess, torch.device("cpu") if static else device)
    if settings.augment == "flip-shift":
        if augmentation is None:
            raise ValueError("augment = 'flip-shift': needs a generator")
        samples, height, width, _ = pool.images.shape
        room = kept.room_for(samples) if static else samples
        pool = replace(pool, augment=FlipShift(samples, height, width, device, augmentation, room=room))
    if settings.logit_adjustment:
        pool = replace(pool, adjustment=torch.zeros(net.output.out_features, device=device))
    optimiser = optimiser or (None if static else optimiser_of(net, settings))
    steps = None
    epochs = range(settings.epochs) if epochs is None else epochs
    net.train()
    for number, rate in enumerate(learning_rates(settings, epochs), start=epochs.start + 1):
        epoch = EPOCHS[batching or settings.batching](len(chunk[1]), len(buffer[1]), settings.batch_size, generator)
        objective.begin_epoch(epoch.task_draws, epoch.replay_draws)
        if pool.augment is not None:
            pool.augment.draw()
        if pool.adjustment is not None:
            counts = log_class_counts(chunk[1], buffer[1], epoch, len(pool.adjustment))
            pool.adjustment.copy_(settings.logit_adjustment * counts)
        if optimiser is None:  # the first epoch has shown what the loss reads
            new = partial(optimiser_of, net, settings, capturable=True)
            ready = kept.ready(net, pool, objective, new, settings.optimiser, settings.weight_decay)
            steps, optimiser, pool = ready.steps, ready.optimiser, ready.pool
        optimiser.set_rate(rate)
        if steps is not None:
            total = steps.epoch(epoch.batches)
        else:
            total = torch.zeros((), device=device)
            for step, order in enumerate(epoch.batches, start=1):
                total += take_step(net, pool, objective, optimiser, order.to(device))
                if after_step is not None:
                    after_step(number, step / len(epoch.batches))
        objective.end_epoch()
        if not math.isfinite(float(total)):
            raise diverged(number, settings)


def log_class_counts(chunk: Tensor, buffer: Tensor, epoch: Epoch, classes: int) -> Tensor:
    """Logarithm of the number of samples of each class that an epoch draws, float (C,); 0 for classes without samples.

    Parameters
    ----------
    chunk, buffer : Tensor
        int64 (n,): labels.
    epoch : Epoch
        Tells how often each sample of chunk and buffer is drawn.
    classes : int
        C.
    """
    new, held = (torch.bincount(labels.cpu(), minlength=classes) for labels in (chunk, buffer))
    counts = new * epoch.task_draws + held * epoch.replay_draws
    return torch.where(counts > 0, counts, 1.0).log()


def pool_of(
    chunk: tuple[Tensor, Tensor],
    buffer: tuple[Tensor, Tensor],
    preprocess: Preprocess,
    device: torch.device | None = None,
) -> Pool:
    """A round's samples, the chunk's before the buffer's, by default on the device of ``preprocess``."""
    device = device or preprocess.scale.device
    images = torch.cat([chunk[0], buffer[0]])
    images = (images.permute(0, 2, 3, 1).contiguous() if images.dim() == 4 else images).to(device)
    labels = torch.cat([chunk[1], buffer[1]]).to(device)
    return Pool(images, labels, torch.arange(len(labels), device=device) >= len(chunk[1]), preprocess)


def optimiser_of(net: Network, settings: TrainingConfig, *, capturable: bool = False) -> Optimiser:
    """The optimiser of local training (key ``optimiser``), at the first epoch's learning rate.

    With ``capturable``, and always on CUDA, its whole state is in tensors on the device, including the learning rate.
    Recorded and plain steps then compute the same.
    """
    parameters = list(net.parameters())
    rate: float | Tensor = settings.learning_rate
    recorded = parameters[0].device.type == "cuda"
    if capturable or recorded:
        # CUDA's fused kernel accepts the rate in float32 only; the CPU's reads a Python number as float64.
        precision = torch.float32 if recorded else torch.float64
        rate = torch.tensor(rate, dtype=precision, device=parameters[0].device)
    word, numbers = word_of(settings, "optimiser")
    if word == "adamw":
        return Adam(parameters, rate, weight_decay=settings.weight_decay, capturable=recorded)
    momentum, nesterov = numbers["momentum"], word == "nesterov"
    return Sgd(parameters, rate, weight_decay=settings.weight_decay, momentum=momentum, nesterov=nesterov)


def learning_rates(settings: TrainingConfig, epochs: range) -> list[float]:
    """Learning rates of some of a round's epochs: a cosine over all epochs, from the full rate to 0.

    Each is computed from the previous one, so that it equals PyTorch's ``CosineAnnealingLR`` to the last bit.
    """
    heights = [1 + math.cos(math.pi * epoch / settings.epochs) for epoch in range(settings.epochs)]
    rates = [settings.learning_rate * heights[epoch] / 2 for epoch in epochs[:1]]
    for epoch in epochs[1:]:
        rates.append(heights[epoch] / heights[epoch - 1] * rates[-1])
    return rates


def diverged(epoch: int, settings: TrainingConfig) -> RunError:
    """The error for an epoch, from 1, whose loss is not finite."""
    return RunError(
        f"epoch {epoch}: the training loss is not finite; try a learning-rate below {settings.learning_rate:g}"
    )


@torch.inference_mode()
def predict(
    net: Network,
    images_of: Callable[[Tensor], Tensor],
    content: Tensor,
    preprocess: Preprocess,
    *,
    mirrored: bool = False,
    home: bool = True,
) -> Tensor:
    """Logits of images in evaluation mode, fetched block by block.

    On a CPU, blocks are processed in parts whose activations fit its cache. On a GPU every pass has the same number of
    images, the last one filled up with its first image: an image's logits then come from the same kernels, whatever
    company it is predicted in, and nothing is copied home before the last pass.

    Parameters
    ----------
    net : Network
        On the device of ``preprocess``; left in evaluation mode.
    images_of : callable
        Maps a slice of ``content`` to uint8 (n, 3, H, W), or to float of the same range, or to float32 (n, ...).
    content : Tensor
        Ids or images, (n, ...).
    preprocess : Preprocess
        Normalisation and device.
    mirrored : bool
        Predict the images' mirror images, left and right exchanged.
    home : bool
        Whether to return the logits on the CPU.

    Returns
    -------
    Tensor
        float32 (n, C), on the CPU or on the device of ``preprocess``.
    """
    net.eval()

    def logits_of(images: Tensor) -> Tensor:
        logits: Tensor = net(images.flip(3) if mirrored else images)
        return logits

    found = _passed(net, logits_of, net.output.out_features, images_of, content, preprocess)
    return found.cpu() if home else found


@torch.inference_mode()
def features_of(net: Network, images_of: Callable[[Tensor], Tensor], content: Tensor, preprocess: Preprocess) -> Tensor:
    """As :func:`predict`, but features instead of logits, float32 (n, F) on the CPU."""
    net.eval()
    return _passed(net, net.features, net.output.in_features, images_of, content, preprocess).cpu()


def _passed(
    net: Network,
    function: Callable[[Tensor], Tensor],
    outputs: int,
    images_of: Callable[[Tensor], Tensor],
    content: Tensor,
    preprocess: Preprocess,
) -> Tensor:
    """A function of preprocessed images, (n, outputs) on the device of ``preprocess``."""
    device = preprocess.scale.device
    if not len(content):
        return torch.empty((0, outputs), device=device)
    if device.type == "cpu":
        blocks = (_cached(images_of(block)) for block in torch.split(content, _FETCHED))
        return torch.cat([function(preprocess(part)) for parts in blocks for part in parts])
    first = images_of(content[:1])
    size = images_at_once(*net.largest_map(*first.shape[1:]))
    found = []
    for block in torch.split(content, size):
        images = images_of(block)
        filled = torch.cat([images, images[:1].expand(size - len(images), *images.shape[1:])])
        found.append(function(preprocess(filled))[: len(images)])
    return torch.cat(found)


def _cached(images: Tensor) -> Sequence[Tensor]:
    """Split images into nearly equal parts that fit a processor's cache."""
    pixels = images[:, 0].numel()
    return images.tensor_split(max(1, min(-(-pixels // _CACHED_PIXELS), len(images) // _FEWEST)))
