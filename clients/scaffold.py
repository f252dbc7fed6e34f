"""The client of SCAFFOLD: federated averaging, with each client's drift from the others taken out of its gradients."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.clients.base import Array, ClientRound, ClientRule, Training
from fedkace_flwr.messaging import wire
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method, Traffic
from fedkace_flwr.training.loop import learning_rates
from fedkace_flwr.training.losses import Batch, TaskLoss

CONTROL = "control"
"""Record of the training message that holds the correction of the client's gradients, c - c_i."""

PREFIX = "control."
"""Before a parameter's name: its part of a correction, or, in a reply, of the client's new control variate."""


class ControlledLoss(TaskLoss):
    """Cross-entropy over all classes met, whose gradient is corrected by a constant; it remembers the mean gradient.

    Parameters
    ----------
    seen : Tensor
        bool (C,): C_<=t.
    parameters : mapping of str to Tensor
        The parameters to train, by name.
    correction : mapping of str to Tensor
        What is added to each one's gradient, c - c_i.
    """

    def __init__(self, seen: Tensor, parameters: Mapping[str, Tensor], correction: Mapping[str, Tensor]) -> None:
        super().__init__(seen, seen)
        self._parameters = parameters
        self._correction = correction
        self._sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._weights = 0.0

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """Mean over the batch, plus the product of parameters and correction, whose gradient is the correction."""
        products = [(self._parameters[name] * each).sum() for name, each in self._correction.items()]
        return super().loss(logits, features, batch) + torch.stack(products).sum()

    @torch.no_grad()
    def remember(self, weight: float) -> None:
        """Count the gradients of the last step in the mean."""
        self._weights += weight
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._sums[name].add_(parameter.grad, alpha=weight)

    def mean_gradients(self) -> dict[str, Tensor]:
        """The mean of the gradients without the correction, on the CPU."""
        return {name: (total / self._weights - self._correction[name]).cpu() for name, total in self._sums.items()}


class ScaffoldClient(ClientRule):
    """SCAFFOLD (Karimireddy et al., ICML 2020), with control variates by its option II.

    Each step takes the gradient plus c - c_i. The client's new control variate is the mean of its gradients in the
    round, which is what option II computes from the way that the model has gone; steps are weighted by their learning
    rates, as there. The server keeps it.

    The publication's optimiser is plain SGD (``optimiser = sgd``). Inferred: another optimiser is given the corrected
    gradients, and the control variate, a mean of gradients, has the same meaning. Weight decay, which all clients have
    in common, is no part of it.
    """

    def objective(self, net: Network, now: ClientRound) -> ControlledLoss:
        """Cross-entropy with corrected gradients.

        Raises
        ------
        MessageError
            The training message has no correction, or one that does not fit the network.
        """
        device, travelling = self.experiment.device, self.experiment.travelling
        trained = [name for name in travelling.replied if name in travelling.parameters]
        records = now.content.array_records
        told = wire.read_arrays(
            RecordDict({wire.ARRAYS: records[CONTROL]} if CONTROL in records else {}),
            {f"{PREFIX}{name}": travelling.sent[name] for name in trained},
        )
        correction = {name: torch.from_numpy(told[f"{PREFIX}{name}"]).to(device) for name in trained}
        parameters = {name: each for name, each in net.named_parameters() if name in correction}
        return ControlledLoss(now.seen.to(device), parameters, correction)

    def training(self, net: Network, now: ClientRound) -> Training:
        """As usual, while the loss remembers the gradients of each step."""
        training = super().training(net, now)
        loss, rates = _loss(training), learning_rates(training.settings, range(training.settings.epochs))
        return replace(training, after_step=lambda epoch, _: loss.remember(rates[epoch - 1]), captured=False)

    def reply(self, now: ClientRound, training: Training) -> dict[str, Array]:
        """The local model, and the new control variate."""
        new = _loss(training).mean_gradients()
        return super().reply(now, training) | {f"{PREFIX}{name}": each.numpy() for name, each in new.items()}


def _loss(training: Training) -> ControlledLoss:
    assert isinstance(training.objective, ControlledLoss)
    return training.objective


METHOD = Method(
    ScaffoldClient,
    "SCAFFOLD",
    server="fedkace_flwr.strategies.scaffold:Scaffold",
    replays=False,
    traffic=Traffic("2*(S + c) + V", "S + R + V"),
)
