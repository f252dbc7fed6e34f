"""Adam, AdamW and SGD on PyTorch's fused kernels, without PyTorch's optimiser classes.

The first of those classes that a process makes imports PyTorch's compiler (``torch._dynamo``), which takes more than a
second of processor time and 73 MiB in every process that trains. Flower
starts a process for each message of a deployed client. State and results are those of ``torch.optim.AdamW``,
``torch.optim.Adam`` and ``torch.optim.SGD`` with ``fused=True``, bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # Kingma and Ba, 2015, algorithm 1


@dataclass(frozen=True)
class Memory:
    """What an optimiser remembers of one parameter.

    Attributes
    ----------
    steps : Tensor
        Float32, scalar: number of steps taken, if the optimiser counts them.
    means : tuple of Tensor
        Running means or sums of gradients, shaped and strided as the parameter.
    """

    steps: Tensor
    means: tuple[Tensor, ...]


class Optimiser(ABC):
    """Changes parameters by their gradients, in fused steps.

    Parameters
    ----------
    parameters : iterable of Tensor
        Float tensors on one device; those without a gradient are skipped.
    rate : float or Tensor
        Learning rate. If it is a tensor on CUDA, steps can be recorded in a CUDA graph.
    weight_decay : float
        Strength of the decay.

    Attributes
    ----------
    parameters : list of Tensor
        As given.
    means : int
        Number of means that it remembers of each parameter.
    memory : dict of Tensor to Memory
        By parameter; a parameter is absent until its first step.
    """

    means: int

    def __init__(self, parameters: Iterable[Tensor], rate: float | Tensor, *, weight_decay: float = 0.0) -> None:
        self.parameters = list(parameters)
        self.memory: dict[Tensor, Memory] = {}
        self.weight_decay = weight_decay
        self._rate = rate
        self._apart: dict[Tensor, bool] = {}  # whether a gradient lies in memory in another order

    @property
    def rate(self) -> float | Tensor:
        """The learning rate of the next step."""
        return self._rate

    def set_rate(self, rate: float) -> None:
        """Change the learning rate, in place if it is a tensor."""
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            self._rate = rate

    def begin(self, parameter: Tensor) -> Memory:
        """Remember nothing of a parameter yet: its memory, all zeros, to be changed in place."""
        steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
        means = tuple(torch.zeros_like(parameter) for _ in range(self.means))
        self.memory[parameter] = Memory(steps, means)
        return self.memory[parameter]

    @torch.no_grad()
    def forget(self) -> None:
        """Start anew: set all memory to zero, in place."""
        for each in self.memory.values():
            for tensor in (each.steps, *each.means):
                tensor.zero_()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters by their gradients."""
        moved = [parameter for parameter in self.parameters if parameter.grad is not None]
        memory = [self.memory.get(parameter) or self.begin(parameter) for parameter in moved]
        self._move(moved, [self._laid_out(parameter) for parameter in moved], memory)

    @abstractmethod
    def _move(self, parameters: list[Tensor], gradients: list[Tensor], memory: Sequence[Memory]) -> None:
        """Change parameters and memory in place."""

    def _laid_out(self, parameter: Tensor) -> Tensor:
        """The gradient, in memory as its parameter is: on a CPU fused kernels pair them by place, not by index."""
        gradient = parameter.grad
        assert gradient is not None
        if parameter not in self._apart:
            self._apart[parameter] = _places(parameter) != _places(gradient)
        return torch.empty_like(parameter).copy_(gradient) if self._apart[parameter] else gradient


class Adam(Optimiser):
    """Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019).

    Each step multiplies the weights by 1 - rate * weight_decay, which is AdamW's decay. It remembers exponential means of
    the gradient and of its square.

    Parameters
    ----------
    parameters, rate, weight_decay
        As for :class:`Optimiser`.
    capturable : bool
        Steps can be recorded in a CUDA graph.
    """

    means = 2

    def __init__(
        self, parameters: Iterable[Tensor], rate: float | Tensor, *, weight_decay: float = 0.0, capturable: bool = False
    ) -> None:
        super().__init__(parameters, rate, weight_decay=weight_decay)
        self._capturable = capturable

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], memory: Sequence[Memory]) -> None:
        adam(
            parameters,
            gradients,
            [each.means[0] for each in memory],
            [each.means[1] for each in memory],
            [],
            [each.steps for each in memory],
            fused=True,
            capturable=self._capturable,
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=self._rate,
            weight_decay=self.weight_decay,
            eps=_EPSILON,
            maximize=False,
        )


class Sgd(Optimiser):
    """Stochastic gradient descent, plain, with momentum, or with Nesterov's, all as in PyTorch.

    A step adds weight_decay times the weights to the gradient, momentum times the sum so far to that, and subtracts rate
    times the sum, or with Nesterov's momentum rate times gradient plus momentum times the sum.

    Parameters
    ----------
    parameters, rate, weight_decay
        As for :class:`Optimiser`.
    momentum : float
        With 0, nothing is remembered.
    nesterov : bool
        Whether the momentum is Nesterov's.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        rate: float | Tensor,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(parameters, rate, weight_decay=weight_decay)
        self.means = 1 if momentum else 0
        self._momentum, self._nesterov = momentum, nesterov

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], memory: Sequence[Memory]) -> None:
        # A sum that begins with zero equals PyTorch's, which begins with the first gradient, and keeps its place.
        sgd(
            parameters,
            gradients,
            [each.means[0] if each.means else None for each in memory],
            fused=True,
            weight_decay=self.weight_decay,
            momentum=self._momentum,
            lr=cast(float, self._rate),  # the kernel takes tensors too
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
        )


def _places(tensor: Tensor) -> list[int]:
    return [step for step, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
