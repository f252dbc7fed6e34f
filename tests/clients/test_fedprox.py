"""FedProx: the proximal term."""

from collections.abc import Callable

import pytest
import torch
from support.systems.in_process import Federation

from fedkace_flwr.clients.fedprox import ProximalLoss
from fedkace_flwr.config import Config
from fedkace_flwr.training.losses import Batch, TaskLoss

Make = Callable[..., Config]
SEEN = torch.ones(3, dtype=torch.bool)


def test_the_term_is_half_mu_times_the_squared_distance_from_the_start() -> None:
    parameters = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)]
    loss = ProximalLoss(SEEN, parameters, mu=0.4)
    logits = torch.zeros(2, 3)
    batch = Batch(torch.empty(0), torch.tensor([0, 1]), torch.zeros(2, dtype=torch.bool), torch.arange(2))
    plain = float(TaskLoss(SEEN, SEEN).loss(logits, logits, batch))
    assert float(loss.loss(logits, logits, batch)) == pytest.approx(plain)
    with torch.no_grad():
        parameters[0] += torch.tensor([1.0, -2.0])
        parameters[1] += 3
    value = loss.loss(logits, logits, batch)
    assert float(value) == pytest.approx(plain + 0.2 * (1 + 4 + 9))
    torch.autograd.backward(value)
    assert parameters[0].grad is not None and parameters[0].grad.tolist() == pytest.approx([0.4, -0.8])


def test_a_large_mu_keeps_the_model_near_the_one_received(small: Make) -> None:
    def moved(mu: float) -> float:
        federation = Federation(small(method="fedprox", fedprox_mu=mu, epochs=4, run_name=f"mu-{mu:g}"))
        first = federation.train(0, 1).weights["output.weight"]
        start = federation.experiment.initial_weights()["output.weight"].numpy()
        return float(((first - start) ** 2).sum())

    assert moved(10.0) < 0.5 * moved(0.0)
