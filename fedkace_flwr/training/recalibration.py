"""Batch-norm statistics taken anew.

The mean of local models needs other activations' statistics than the mean of theirs: where the models have moved apart,
the averaged statistics fit nobody's activations (Izmailov et al., 2018, "Averaging weights leads to wider optima and
better generalization", section 3.2; Jordan et al., 2023, "REPAIR").
"""

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from fedkace_flwr.networks.network import Network
from fedkace_flwr.training.loop import Preprocess

_LARGEST_BATCH = 256


def recalibrate(net: Network, images: Tensor, preprocess: Preprocess, generator: torch.Generator) -> None:
    """Replace the running statistics of every batch-norm layer that is not frozen, if there are any, in place, by those over some images.

    Parameters
    ----------
    net : Network
        On the device of ``preprocess``; left in evaluation mode.
    images : Tensor
        uint8 (n, 3, H, W), n at least 2.
    preprocess : Preprocess
        Normalisation and device.
    generator : torch.Generator
        CPU generator; mixes the images before they are split into batches of equal size.
    """
    norms = [name for name, module in net.named_modules() if isinstance(module, _BatchNorm)]
    if all(f"{name}.running_mean" in net.frozen for name in norms):
        net.eval()
        return
    mixed = images[torch.randperm(len(images), generator=generator)]
    batches = mixed.tensor_split(-(-len(mixed) // _LARGEST_BATCH))
    update_bn((preprocess(batch) for batch in batches), net)
    net.eval()
