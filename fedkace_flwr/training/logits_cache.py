"""Test logits, computed once for all clients of a process that answer with the same model."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedkace_flwr.compute.memory import at_home
from fedkace_flwr.samples import Samples


class SharedLogits:
    """Logits of the last network that was used, class by class.

    After the switch all clients answer with one global model, and only their classes differ. Each class's images
    pass through the network separately, in the same blocks for every client, so no logit depends on which client came
    first.

    Parameters
    ----------
    together : bool
        Let the classes that are missing pass together. For a GPU, where every pass has the same size anyway
        (:func:`~fedkace_flwr.training.loop.predict`).
    """

    def __init__(self, *, together: bool = False) -> None:
        self._together = together
        self._weights = b""
        self._known: dict[bytes, Tensor] = {}

    def __call__(self, net: nn.Module, samples: Samples, logits_of: Callable[[Samples], Tensor]) -> Tensor:
        """Logits of samples held by id.

        Parameters
        ----------
        net : Module
            The network; earlier logits are used while its weights are the same.
        samples : Samples
            By id, grouped by class.
        logits_of : callable
            Maps samples to their logits by ``net``, float32 (n, C).

        Returns
        -------
        Tensor
            float32 (n, C), in the order of the samples.
        """
        weights = _digest(net)
        if weights != self._weights:
            self._weights, self._known = weights, {}
        classes = torch.split(torch.arange(len(samples)), _runs(samples.labels))
        keys = [samples.content[rows].numpy().tobytes() for rows in classes]
        missing = [(key, rows) for key, rows in zip(keys, classes, strict=True) if key not in self._known]
        for group in [missing] if self._together and missing else [[each] for each in missing]:
            logits = logits_of(samples.take(torch.cat([rows for _, rows in group])))
            parts = torch.split(logits, [len(rows) for _, rows in group])
            self._known |= {key: part for (key, _), part in zip(group, parts, strict=True)}
        return torch.cat([self._known[key] for key in keys])


def _digest(net: nn.Module) -> bytes:
    digest = hashlib.sha256()
    for tensor in at_home(net.state_dict()).values():
        digest.update(tensor.contiguous().numpy().data)
    return digest.digest()


def _runs(labels: Tensor) -> list[int]:
    """Lengths of the runs of equal labels."""
    return [int(length) for length in torch.unique_consecutive(labels, return_counts=True)[1]]
