"""Losses between student and teacher, and networks cut in two."""

import pytest
import torch
from support.gradients import gradient_of
from support.made.networks import seeded_resnet18

from fedkace_flwr.training.distillation import (
    DistilledLoss,
    soft_cross_entropy,
    softened_divergence,
)
from fedkace_flwr.training.losses import Batch, TaskLoss


def random_logits(seed: int, size: int = 6, classes: int = 5) -> torch.Tensor:
    return torch.randn(size, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_divergence_is_zero_and_at_rest_where_student_and_teacher_agree():
    student, mask = random_logits(0).requires_grad_(), torch.tensor([True, False, True, True, False])
    divergence = softened_divergence(student, student.detach() + 3, mask, 5.0)
    assert divergence.shape == (6,)
    assert torch.allclose(divergence, torch.zeros(6, dtype=torch.float64), atol=1e-12)
    divergence.sum().backward()
    assert torch.allclose(gradient_of(student), torch.zeros_like(student), atol=1e-12)


def test_divergence_is_the_textbooks_over_each_samples_own_classes():
    student, teacher = random_logits(1), random_logits(2)
    masks = torch.rand(6, 5, generator=torch.Generator().manual_seed(3)) < 0.6
    masks[:, 2] = True
    found = softened_divergence(student, teacher, masks, 2.5)
    for row, mask in enumerate(masks):
        q, p = (student[row, mask] / 2.5).softmax(0), (teacher[row, mask] / 2.5).softmax(0)
        assert found[row].item() == pytest.approx(2.5**2 * float((p * (p / q).log()).sum()), abs=1e-12)


def test_divergence_differs_from_soft_cross_entropy_by_the_teachers_entropy():
    student, teacher = random_logits(4), random_logits(5)
    mask = torch.tensor([True, True, False, True, True])
    difference = (
        soft_cross_entropy(student, teacher, mask, 2.0) - softened_divergence(student, teacher, mask, 2.0).mean() / 4
    )
    assert difference.item() == pytest.approx(soft_cross_entropy(teacher, teacher, mask, 2.0).item(), abs=1e-12)


def test_the_two_halves_of_a_network_make_the_whole():
    net, images = seeded_resnet18(5, 2, "cifar", 1).eval(), torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        whole, maps = net(images), net.lower_half()(images)
        assert maps.shape == (3, 4, 4, 4)
        assert torch.equal(net.upper_half()(maps), whole)


def test_a_label_weight_of_one_is_plain_training():
    logits, labels = random_logits(6), torch.tensor([0, 2, 0, 3, 3, 2])
    mask = torch.tensor([True, False, True, True, False])
    batch = Batch(torch.empty(6, 0), labels, torch.zeros(6, dtype=torch.bool), torch.arange(6))
    with_teacher = DistilledLoss(mask.expand(6, 5), random_logits(7), weight=1.0, temperature=5.0)
    by_labels = DistilledLoss(mask.expand(6, 5), None, weight=0.3, temperature=5.0)
    loss = with_teacher.loss(logits, logits, batch)
    assert torch.equal(loss, by_labels.loss(logits, logits, batch))
    assert torch.equal(loss, TaskLoss(mask, mask).loss(logits, logits, batch))
    half = DistilledLoss(mask.expand(6, 5), random_logits(7), weight=0.5, temperature=5.0).loss(logits, logits, batch)
    divergence = softened_divergence(logits, random_logits(7), mask, 5.0)
    assert half.item() == pytest.approx(0.5 * float(loss) + 0.5 * float(divergence.mean()), abs=1e-12)
