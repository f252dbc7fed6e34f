"""The client of AFL: no training by gradient, but sums over its samples' features, from which the server solves for a head."""

from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ConfigRecord
from torch import Tensor
from torch.nn import functional

from fedkace_flwr.clients.base import Array, ClientRound, ClientRule, Kept, Training
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key
from fedkace_flwr.messaging.wire import Shapes
from fedkace_flwr.registry import Method, Traffic
from fedkace_flwr.samples import Samples
from fedkace_flwr.training.loop import features_of

GRAM, CROSS = "gram", "cross"
"""Names of the arrays of a reply: X'X, its upper triangle row by row, and X'Y."""

COUNTED = "counted"
"""Record of the training message, and its field: the client's last round that is in the server's sums; 0 if there is none."""

_STORED = "afl."


@dataclass(frozen=True)
class AflKeys:
    """AFL."""

    afl_ridge: float = key(1.0, "Ridge gamma of the regression from features to classes.", above=0)

    def check(self, config: Config) -> None:
        """Check that there is an output layer to solve for, and nothing else to train.

        Raises
        ------
        ConfigError
            The output layer is fixed, more than it is left to training, or the body is changed after it.
        """
        if config.method != "afl":
            return
        model, only = config.model, "AFL learns nothing but the output layer"
        if model.output_layer != "learned":
            raise ConfigError(f"output-layer = {model.output_layer!r}: {only}; must be 'learned'")
        if model.trainable in ("norm", "lora"):
            raise ConfigError(f"trainable = {model.trainable!r}: {only}; must be 'output'")
        if config.answers.recalibrate_batchnorm:
            raise ConfigError(
                "recalibrate-batchnorm = true: AFL's output layer fits the body's own statistics; must be false"
            )


def shapes_for(model: Shapes) -> dict[str, tuple[tuple[int, ...], np.dtype[np.float64]]]:
    """Shapes of a reply's arrays for a network with these arrays."""
    classes, features = model["output.weight"][0]
    double = np.dtype(np.float64)
    return {GRAM: ((features * (features + 1) // 2,), double), CROSS: ((features, classes), double)}


class AflClient(ClientRule):
    """AFL (He et al., CVPR 2025): an analytic head on a frozen body.

    With X the features of samples, float (n, F), and Y their classes, one-hot (n, C), the head is the ridge regression
    (X'X + gamma I)^-1 X'Y over all samples of all clients and rounds. Its classes need not be seen again, and no replay
    is needed.

    The publication's clients send their own solution and its Gram matrix, from which the server computes the joint one
    ("absolute aggregation law"); here they send X'X and X'Y, which lead to the same. There is no bias, as there.

    Inferred: gamma stays in the joint solution (``afl-ridge``; the publication takes it out again, which a singular
    X'X does not allow); the body is the one with which the run begins, in evaluation mode. A reply covers every chunk
    that the server has not counted, so that each sample counts once even if replies are lost; but nothing of a reply to
    a round that is undone is sent again, or what is wrong with it would undo every further round.
    """

    _unsent: dict[str, Tensor]

    def train(self, training: Training, chunk: Samples, buffer: Samples) -> None:
        """Nothing is trained."""

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """No buffer; the sums that the server has not counted."""
        self._unsent = self._sums(training, now)
        return Kept(now.state.buffer, {f"{_STORED}{name}": each for name, each in self._unsent.items()})

    def reply(self, now: ClientRound, training: Training) -> dict[str, Array]:
        """The sums that the server has not counted."""
        return {name: each.numpy() for name, each in self._unsent.items()}

    def _sums(self, training: Training, now: ClientRound) -> dict[str, Tensor]:
        features = features_of(
            training.net, lambda block: block, self.images(now.chunk), self.experiment.preprocess
        ).double()
        classes = functional.one_hot(now.chunk.labels, self.experiment.num_classes).double()
        rows, columns = torch.triu_indices(features.shape[1], features.shape[1])
        sums = {GRAM: (features.T @ features)[rows, columns], CROSS: features.T @ classes}
        counted = now.content.config_records.get(COUNTED, ConfigRecord()).get(COUNTED, 0)
        # More than the state's round, if a later state was lost.
        if not now.state.has_local_model or (isinstance(counted, int) and counted >= now.state.round):
            return sums
        return {name: each + now.state.extra.get(f"{_STORED}{name}", 0.0) for name, each in sums.items()}


METHOD = Method(
    AflClient,
    "AFL",
    server="fedkace_flwr.strategies.afl:Afl",
    keys=(AflKeys,),
    replays=False,
    samples=lambda config, round_number: 0,
    traffic=Traffic("2*(S + c) + 15", "(4*F*(F + 1) + 132) + (8*F*C + 133) + R"),
)
