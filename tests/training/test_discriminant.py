"""An output layer fitted in closed form."""

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from support.made.networks import seeded_resnet18

from fedkace_flwr.training.discriminant import discriminant, discriminant_share, refit
from fedkace_flwr.training.loop import Preprocess, predict

PLAIN = Preprocess(torch.full((1, 3, 1, 1), 1 / 255), torch.zeros(1, 3, 1, 1))


def test_two_classes_by_hand() -> None:
    """Means (0, 0) and (4, 0); covariances diag(1, 0) and diag(0, 4), whose mean is diag(1/2, 2)."""
    x = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [4.0, -2.0], [4.0, 2.0]])
    classes, weight, bias = discriminant(x, torch.tensor([3, 3, 7, 7]), shrinkage=0.2)
    spread = [0.8 * 0.5 + 0.2 * 1.25, 0.8 * 2 + 0.2 * 1.25]
    assert classes.tolist() == [3, 7]
    assert weight.tolist() == [[0, 0], pytest.approx([4 / spread[0], 0])]
    assert bias.tolist() == pytest.approx([0, -8 / spread[0]])


def clusters(seed: int, counts: tuple[int, ...], size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    centres, mixing = torch.randn(len(counts), size, generator=draws), torch.randn(size, size, generator=draws)
    return centres[labels] + torch.randn(len(labels), size, generator=draws) @ mixing, labels


@pytest.mark.parametrize("shrinkage", [0.05, 0.5, 1.0])
def test_posteriors_equal_scikit_learns(shrinkage: float) -> None:
    x, labels = clusters(1, (12, 5, 9))
    reference = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=[1 / 3] * 3)
    reference.fit(x.double().numpy(), labels.numpy())
    _, weight, bias = discriminant(x, labels, shrinkage)
    found = (x.double() @ weight.T + bias).softmax(dim=1)
    torch.testing.assert_close(found, torch.from_numpy(reference.predict_proba(x.double().numpy())))


def test_numbers_of_samples_and_their_order_do_not_matter() -> None:
    x, labels = clusters(2, (4, 7))
    once = discriminant(x, labels, 0.1)
    order = torch.cat([torch.arange(len(x)).flip(0), (labels == 1).nonzero().flatten()])  # class 1 twice
    for one, other in zip(once, discriminant(x[order], labels[order], 0.1), strict=True):
        torch.testing.assert_close(one, other)


def test_one_sample_of_each_class_is_the_nearest_mean() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 6.0]])
    _, weight, bias = discriminant(x, torch.arange(3), 0.1)
    between = torch.tensor([[0.9, 0.0], [1.1, 0.0], [0.0, 2.9], [0.0, 3.1]], dtype=torch.float64)
    assert (between @ weight.T + bias).argmax(dim=1).tolist() == [0, 1, 0, 2]


def test_rows_of_absent_classes_stay_and_so_do_all_other_weights() -> None:
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (30, 3, 8, 8), dtype=torch.uint8, generator=draws)
    labels = torch.arange(30) % 3 + 1  # 1, 2 and 3 of five classes
    net, before = seeded_resnet18(5, 4, "cifar", 3), seeded_resnet18(5, 4, "cifar", 3)
    refit(net, images, labels, PLAIN, 0.1)
    for name, value in net.state_dict().items():
        was = before.state_dict()[name]
        assert torch.equal(value, was) != name.startswith("output."), name
        if name.startswith("output."):
            assert torch.equal(value[[0, 4]], was[[0, 4]])
    seen = torch.tensor([False, True, True, True, False])
    answers = predict(net, lambda block: block, images, PLAIN).masked_fill(~seen, -torch.inf).argmax(dim=1)
    assert float((answers == labels).double().mean()) > 0.6, "random features separate the samples they are fitted to"


def test_the_share_fades_by_halves_until_it_is_below_one_percent() -> None:
    assert [discriminant_share("fading", number) for number in (1, 2, 3, 7, 8, 500)] == [1, 0.5, 0.25, 1 / 64, 0, 0]
    assert [discriminant_share(name, 9) for name in ("trained", "both", "discriminant")] == [0, 0.5, 1]
