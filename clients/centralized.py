"""The client of Centralized: the upper bound that regret is measured against (paper, section 5.1)."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clients.base import ContinualClient, Metrics, Stopwatch
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods.centralized import CentralizedKeys
from fedkace_flwr.results.reference_cache import anchors, cached_accuracy
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for, seed_for
from fedkace_flwr.training.loop import train
from fedkace_flwr.training.losses import TaskLoss


class CentralizedClient(ContinualClient):
    """After every round a new model, trained on all of the client's samples so far, that it would not have kept.

    No model travels. Each round stands for itself: its weights depend on seed, client and round alone. With
    ``centralized-every`` above 1 only some rounds are trained, and the ones between are interpolated linearly and
    marked so. Only simulation can do this: on a device the earlier chunks are gone.
    """

    def evaluate(self, parameters: list[np.ndarray[Any, Any]], config: dict[str, Any]) -> tuple[float, int, Metrics]:
        """Train, or take from the cache, and test; a round already answered is answered again."""
        number = int(config[keys.ROUND])
        state = self.store.before(number + 1)
        if state.evaluated != number:
            watch = Stopwatch()
            with watch(keys.TRAINING_SECONDS):
                accuracy, interpolated = self._accuracy(number)
            seen = self._met(number)
            report: Metrics = {
                keys.ACCURACY: accuracy,
                keys.SEEN_CLASSES: int(seen.sum()),
                keys.EXAMPLES: len(self.source.test_set(seen)),
                keys.INTERPOLATED: int(interpolated),
                **watch.seconds,
            }
            state = replace(state, round=number, seen=seen, evaluated=number, evaluation=report)
            self.store.save(state)
        metrics = dict(state.evaluation)
        return 1.0 - metrics[keys.ACCURACY], metrics.pop(keys.EXAMPLES), metrics

    def _accuracy(self, number: int) -> tuple[float, bool]:
        """The reference of a round, and whether it was interpolated."""
        settings = self.config
        below, above = anchors(number, settings.of(CentralizedKeys).centralized_every, settings.stream.rounds)
        left, right = (
            cached_accuracy(settings, self.number, anchor, lambda anchor=anchor: self._train_and_test(anchor))  # type: ignore[misc]
            for anchor in (below, above)
        )
        share = (number - below) / (above - below) if above > below else 0.0
        return left + share * (right - left), above > below

    def _train_and_test(self, number: int) -> float:
        seed, experiment = self.config.run.seed, self.experiment
        samples = self._samples(number)
        seen = self._met(number)
        net = experiment.fresh_network(seed_for(seed, "centralized weights", self.number, number))
        none = Samples.none()
        fetch = experiment.dataset.fetch
        train(
            net,
            (samples.images(fetch), samples.labels),
            (none.images(fetch), none.labels),
            TaskLoss(seen.to(experiment.device), seen.to(experiment.device)),
            self.config.training,
            experiment.preprocess,
            generator_for(seed, "centralized batches", self.number, number),
            captured=self.config.run.step == "captured",
        )
        accuracy, _ = self._test(net, seen)
        assert accuracy is not None  # a data set has test images of every class
        return accuracy

    def _samples(self, number: int) -> Samples:
        """All chunks of rounds 1 to ``number``."""
        samples = Samples.none()
        for earlier in range(1, number + 1):
            samples = samples.followed_by(self.experiment.chunk(self.number, earlier))
        return samples

    def _met(self, number: int) -> torch.Tensor:
        return self._samples(number).class_counts(self.experiment.num_classes) > 0
