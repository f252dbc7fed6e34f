"""Test logits shared between clients: the same whoever asks first, and never those of other weights."""

from collections.abc import Callable

import torch

from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.samples import Samples
from fedkace_flwr.training.logits_cache import SharedLogits
from fedkace_flwr.training.loop import predict

Make = Callable[..., Config]


class Counted:
    """Logits by a real network, counting the images that it sees."""

    def __init__(self, experiment: Experiment, seed: int) -> None:
        self.experiment = experiment
        self.net = experiment.fresh_network(seed)
        self.images = self.calls = 0

    def __call__(self, samples: Samples) -> torch.Tensor:
        self.images += len(samples)
        self.calls += 1
        return predict(self.net, self.experiment.dataset.fetch, samples.content, self.experiment.preprocess)


def met(*labels: int) -> torch.Tensor:
    return torch.isin(torch.arange(10), torch.tensor(labels))


def test_an_image_passes_through_a_model_once_and_gives_the_same_logits_to_all(small: Make) -> None:
    experiment = Experiment(small())
    logits_of, shared = Counted(experiment, 1), SharedLogits()
    first, second = (experiment.test_set(client, met(*labels)) for client, labels in ((0, (1, 4)), (1, (0, 1, 4, 7))))
    one, two = (shared(logits_of.net, samples, logits_of) for samples in (first, second))
    assert logits_of.images == len(second)
    both = torch.isin(second.labels, torch.tensor([1, 4]))
    assert torch.equal(one, two[both])

    other = SharedLogits()
    assert torch.equal(other(logits_of.net, second, logits_of), two)  # nobody else had asked before
    whole = logits_of(second)
    assert torch.allclose(whole, two, atol=1e-4) and (whole.argmax(1) == two.argmax(1)).all()


def test_together_the_classes_that_are_missing_pass_at_once(small: Make) -> None:
    """As on a GPU: each image still passes once, and each logit goes to its image."""
    experiment = Experiment(small())
    logits_of, shared = Counted(experiment, 1), SharedLogits(together=True)
    sets = [experiment.test_set(0, met(*labels)) for labels in ((1, 4), (0, 1, 4, 7), (4, 7))]
    found = [shared(logits_of.net, samples, logits_of) for samples in sets]
    assert (logits_of.calls, logits_of.images) == (2, len(sets[1]))
    for samples, logits in zip(sets, found, strict=True):
        assert torch.allclose(logits, SharedLogits()(logits_of.net, samples, logits_of), atol=1e-4)


def test_other_weights_have_other_logits(small: Make) -> None:
    experiment = Experiment(small())
    logits_of, shared = Counted(experiment, 1), SharedLogits()
    samples = experiment.test_set(0, met(2, 3))
    before = shared(logits_of.net, samples, logits_of)
    with torch.no_grad():
        logits_of.net.output.bias[2] += 1
    after = shared(logits_of.net, samples, logits_of)
    assert torch.allclose(after[:, 2], before[:, 2] + 1) and torch.equal(after[:, 3], before[:, 3])
    assert logits_of.images == 2 * len(samples)


def test_clients_with_test_sets_of_their_own_get_their_own(small: Make) -> None:
    experiment = Experiment(small(test_per_class=5))
    logits_of, shared = Counted(experiment, 1), SharedLogits()
    for client in (0, 1):
        samples = experiment.test_set(client, met(2, 3))
        found = shared(logits_of.net, samples, logits_of)
        assert torch.allclose(found, logits_of(samples), atol=1e-4)
