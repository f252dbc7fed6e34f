"""Small networks with known weights."""

import torch

from fedkace_flwr.networks.resnet import ResNet18, resnet18


def seeded_resnet18(num_classes: int, width: int, stem: str, seed: int) -> ResNet18:
    """Return a ResNet-18 whose initial weights depend only on ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return resnet18(num_classes, width, stem)
