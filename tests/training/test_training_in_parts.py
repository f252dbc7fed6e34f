"""A training in parts, with the optimiser kept between them, is one training."""

from typing import Any

import numpy as np
import pytest
import torch
from support.made.networks import seeded_resnet18

from fedkace_flwr.algorithms import tfcl_tags as tags
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training.loop import Preprocess, optimiser_of, train
from fedkace_flwr.training.losses import TaskLoss


@pytest.mark.parametrize("word", ["adamw", "sgd", "nesterov"])
def test_training_in_two_parts_with_the_optimiser_kept_is_training_at_once(word: str) -> None:
    plan, mask = TrainingConfig(epochs=4, batch_size=8, optimiser=word), torch.ones(5, dtype=torch.bool)
    draws = torch.Generator().manual_seed(0)
    chunk = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8, generator=draws), torch.arange(8) % 5
    empty = chunk[0][:0], chunk[1][:0]
    as_is = Preprocess.by_statistics((0.5,) * 3, (0.3,) * 3, torch.device("cpu"))
    once, parts = (
        seeded_resnet18(5, 2, "cifar", 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for _ in range(2)
    )

    def run(net: Any, **more: Any) -> None:
        train(net, chunk, empty, TaskLoss(mask, mask), plan, as_is, draws, **more)

    draws.manual_seed(1)
    run(once)
    draws.manual_seed(1)
    optimiser = optimiser_of(parts, plan)
    shares: list[tuple[int, float]] = []
    run(parts, optimiser=optimiser, epochs=range(2), after_step=lambda *told: shares.append(told))
    resumed = optimiser_of(parts, plan)
    tags.write_means(resumed, tags.read_means(optimiser), 2)
    run(parts, optimiser=resumed, epochs=range(2, 4), after_step=lambda *told: shares.append(told))
    assert shares == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    for one, other in zip(once.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_the_learning_rate_of_a_part_is_the_one_it_has_in_the_whole():
    plan, net = TrainingConfig(epochs=4, batch_size=8), seeded_resnet18(5, 2, "cifar", 1)
    images, labels, mask = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4), torch.ones(5, dtype=torch.bool)
    as_is = Preprocess.by_statistics((0.5,) * 3, (0.3,) * 3, torch.device("cpu"))
    rates: list[float] = []
    for part in (range(1), range(1, 3), range(3, 4)):
        optimiser = optimiser_of(net, plan)
        train(
            net,
            (images, labels),
            (images[:0], labels[:0]),
            TaskLoss(mask, mask),
            plan,
            as_is,
            torch.Generator().manual_seed(0),
            optimiser=optimiser,
            epochs=part,
            after_step=lambda *_, held=optimiser: rates.append(held.rate),
        )
    assert rates == pytest.approx([0.01 * (1 + np.cos(np.pi * epoch / 4)) / 2 for epoch in range(4)], rel=1e-9)
