"""Adam and AdamW on PyTorch's fused kernel, without PyTorch's optimiser classes.

The first of those classes that a process makes imports PyTorch's compiler (``torch._dynamo``), which takes more than a
second of processor time and 73 MiB in every process that trains. Flower
starts a process for each message of a deployed client. State and results are those of ``torch.optim.AdamW`` and
``torch.optim.Adam`` with ``fused=True``, bit for bit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # Kingma and Ba, 2015, algorithm 1


@dataclass(frozen=True)
class Moments:
    """What Adam remembers of one parameter.

    Attributes
    ----------
    steps : Tensor
        Float32, scalar: number of steps taken.
    first, second : Tensor
        Exponential means of the gradient and of its square, shaped and strided as the parameter.
    """

    steps: Tensor
    first: Tensor
    second: Tensor


class Adam:
    """Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019), in fused steps.

    Parameters
    ----------
    parameters : iterable of Tensor
        Float tensors on one device; those without a gradient are skipped.
    rate : float or Tensor
        Learning rate.
    weight_decay : float
        Each step multiplies the weights by 1 - rate * weight_decay, which is AdamW's decay.
    capturable : bool
        The state can be recorded in a CUDA graph.

    Attributes
    ----------
    parameters : list of Tensor
        As given.
    moments : dict of Tensor to Moments
        By parameter; a parameter is absent until its first step.
    """

    def __init__(
        self, parameters: Iterable[Tensor], rate: float | Tensor, *, weight_decay: float = 0.0, capturable: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.moments: dict[Tensor, Moments] = {}
        self.weight_decay = weight_decay
        self._rate = rate
        self._capturable = capturable
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

    @torch.no_grad()
    def forget(self) -> None:
        """Start anew: set moments and steps to zero, in place."""
        for each in self.moments.values():
            for tensor in (each.steps, each.first, each.second):
                tensor.zero_()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters by their gradients."""
        moved = [parameter for parameter in self.parameters if parameter.grad is not None]
        moments = [self.moments.get(parameter) or self._begun(parameter) for parameter in moved]
        adam(
            moved,
            [self._laid_out(parameter) for parameter in moved],
            [each.first for each in moments],
            [each.second for each in moments],
            [],
            [each.steps for each in moments],
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

    def _laid_out(self, parameter: Tensor) -> Tensor:
        """The gradient, in memory as its parameter is: on a CPU the fused kernel pairs them by place, not by index."""
        gradient = parameter.grad
        assert gradient is not None
        if parameter not in self._apart:
            self._apart[parameter] = _places(parameter) != _places(gradient)
        return torch.empty_like(parameter).copy_(gradient) if self._apart[parameter] else gradient

    def _begun(self, parameter: Tensor) -> Moments:
        steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self.moments[parameter] = Moments(steps, torch.zeros_like(parameter), torch.zeros_like(parameter))
        return self.moments[parameter]


def _places(tensor: Tensor) -> list[int]:
    return [step for step, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
