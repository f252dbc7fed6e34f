"""The client of Centralized: the upper bound against which regret is measured (paper, section 5.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.clients.base import Array, ClientRule, Evaluation, Metrics, Stopwatch, Training
from fedkace_flwr.config import Config
from fedkace_flwr.keys import Number, key, word_of
from fedkace_flwr.messaging import wire
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method, Traffic
from fedkace_flwr.results.reference_cache import cached_accuracy
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import seed_for
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.losses import TaskLoss


@dataclass(frozen=True)
class CentralizedKeys:
    """Centralized."""

    centralized_rounds: str = key(
        "all",
        "Train in `all` rounds, or only in rounds 1, 1 + m, 1 + 2m, ... and the last, where m is the first number after `every`, and also in each of the first rounds, up to the second number, where the accuracy changes most. Accuracies between them are interpolated and marked as such.",
        words={"all": (), "every": (Number("step", 1, low=1), Number("first", 1, low=1))},
    )

    def trains(self, round_number: int, rounds: int) -> bool:
        """Return whether a round, from 1, is trained in a run of so many rounds."""
        numbers = word_of(self, "centralized_rounds")[1] or {"step": 1, "first": 1}
        return round_number <= numbers["first"] or (round_number - 1) % numbers["step"] == 0 or round_number >= rounds

    def anchors(self, round_number: int, rounds: int) -> tuple[int, int]:
        """Return the nearest trained rounds on either side of a round; both are the round itself if it is trained."""
        below = next(number for number in range(round_number, 0, -1) if self.trains(number, rounds))
        above = next(number for number in count(round_number) if self.trains(number, rounds))
        return below, above


def samples(config: Config, round_number: int) -> int:
    """Count the samples of an epoch: all chunks so far, or none in a round that is not trained."""
    trained = config.of(CentralizedKeys).trains(round_number, config.stream.rounds)
    return round_number * config.mean_chunk if trained else 0


_REFERENCE = "centralized.reference"
"""Stored tensor, float64 (2,): whether the last accuracy is interpolated, and the seconds that it took."""


class CentralizedClient(ClientRule):
    """Trains a new model after every round, on all samples of the client so far.

    With ``fraction-train`` these are the chunks of the rounds for which it is drawn, as with every other method. No
    model travels. Rounds are independent: a round's weights depend on seed, client and round alone. With
    ``centralized-rounds = every`` only some rounds are trained; those between them are interpolated linearly and
    marked. Only a simulation can do this: a real device no longer has its earlier chunks.
    """

    receives_model = False
    evaluation_times = frozenset()  # the report holds the training's seconds

    def catch_up(self, state: ClientState, round_number: int) -> ClientState:
        """Train and test the round's model, or take its accuracy from the cache; do nothing before the first chunk."""
        seen = self._seen(round_number)
        if not bool(seen.any()):
            return state
        watch = Stopwatch()
        with watch(wire.TRAINING_SECONDS):
            accuracy, interpolated = self._accuracy(round_number)
        facts = torch.tensor([float(interpolated), watch.seconds[wire.TRAINING_SECONDS]], dtype=torch.float64)
        extra = {**state.extra, _REFERENCE: facts}
        return replace(state, round=round_number, seen=seen, local_accuracy=accuracy, extra=extra)

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Leave the state as it is: there is no global model."""
        return state, {}

    def evaluate(self, net: Network, state: ClientState) -> Evaluation:
        """The accuracy found by :meth:`catch_up`."""
        interpolated, seconds = state.extra[_REFERENCE].tolist()
        report = {wire.INTERPOLATED: int(interpolated), wire.TRAINING_SECONDS: seconds}
        return Evaluation(state.local_accuracy, len(self.source.test_set(state.seen)), report)

    def answering(self, sent: Mapping[str, Array], state: ClientState) -> None:
        """Nothing: no model outlives its test."""

    def _accuracy(self, number: int) -> tuple[float, bool]:
        """The accuracy of a round, and whether it is interpolated."""
        settings = self.config
        below, above = settings.of(CentralizedKeys).anchors(number, settings.stream.rounds)
        first = next(each for each in range(1, number + 1) if self.experiment.trains(self.number, each))
        below = max(below, first)  # there is nothing to train on before
        data = self.experiment.dataset.digest
        left, right = (
            cached_accuracy(settings, self.number, anchor, lambda anchor=anchor: self._train_and_test(anchor), data)  # type: ignore[misc]
            for anchor in (below, above)
        )
        share = (number - below) / (above - below) if above > below else 0.0
        return left + share * (right - left), above > below

    def _train_and_test(self, number: int) -> float:
        seen = self._seen(number)
        mask = seen.to(self.experiment.device)
        training = Training(
            self.experiment.fresh_network(seed_for(self.config.run.seed, "centralized weights", self.number, number)),
            TaskLoss(mask, mask),
            self.config.training,
            self.generator("centralized batches", number),
            augmentation=self.generator("centralized augmentation", number),
            captured=self.experiment.captured,
        )
        self.train(training, self.experiment.learned(self.number, number), Samples.none())
        tested = self.test(training.net, seen)
        assert tested.accuracy is not None  # a data set has test images of every class
        return tested.accuracy

    def _seen(self, number: int) -> Tensor:
        return self.experiment.learned(self.number, number).class_counts(self.experiment.num_classes) > 0


METHOD = Method(
    CentralizedClient,
    "Centralized",
    server="fedkace_flwr.strategies.centralized:Centralized",
    role="reference",
    keys=(CentralizedKeys,),
    needs_stream=True,
    replays=False,
    samples=samples,
    traffic=Traffic("c", "R"),
)
