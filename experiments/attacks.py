"""The attacks of the study ``poisoning``: what hostile clients do in a simulation.

A hostile client trains honestly, except on flipped labels, and then alters its reply. It is not bound by the clipping
of its own modifiers, but its messages have the right form: the checks of form are tested elsewhere. Each attack is an
entry point in ``pyproject.toml``.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from flwr.app import Context, Message
from torch import Tensor

from fedkace_flwr.data.readers.catalogue import form_asked
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.flower.internals import ClientAppCallable, Mod
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import NumpyArray, Weights
from fedkace_flwr.networks.catalogue import facts_of
from fedkace_flwr.networks.network import Blueprint
from fedkace_flwr.privacy.hostile import Attack
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import seed_for
from fedkace_flwr.sources import Late, Source

_MEAN, _VARIANCE = ".running_mean", ".running_var"
_OUTPUT = ("output.weight", "output.bias")
_BRIEF = "brief-label-flip"
_BRIEF_ROUNDS = 5
_FLIPS = ("label-flip", _BRIEF)


class StudyAttack(Attack):
    """One of the attacks, by the name in the key ``attack``."""

    def check(self, *, sends_models: bool, trains_on_chunks: bool) -> None:
        """Check that the attack changes anything."""
        config, kind, scale = self.config, self.config.attack.name, self.config.attack.scale
        told, flips = f"attack = {config.attack.attack!r} with", kind in _FLIPS
        if not (sends_models or trains_on_chunks):
            raise ConfigError(f"{told} method = {config.method!r}, whose clients send no models: must be 'none'")
        if not sends_models and not flips:
            raise ConfigError(
                f"{told} method = {config.method!r}, whose clients send no models: must be 'label-flip' or 'none'"
            )
        if not sends_models and self.factor != 1:
            raise ConfigError(
                f"{told} method = {config.method!r}, whose clients send no models: must be 'label-flip', without a scale"
            )
        if not trains_on_chunks and flips:
            raise ConfigError(
                f"{told} method = {config.method!r}, whose clients keep all data: must be an attack on models, or 'none'"
            )
        if kind == "rolled-outputs" and config.model.output_layer != "learned":
            raise ConfigError(
                f"{told} output-layer = {config.model.output_layer!r} (method = {config.method!r}), which never changes: "
                "must be another attack, or output-layer = 'learned'"
            )
        if kind in ("flipped-means", "inflated-variances"):
            self._check_statistics(told)
        if flips and config.stream.window == 1 and config.stream.kind in ("windows", "quantity-skew"):
            raise ConfigError(
                f"{told} window = 1, one class in each chunk: must be another attack, or window at least 2"
            )
        if kind == "false-count" and scale == 1:
            raise ConfigError(f"{told} a scale of 1, the true count: must have another, as false-count:10")

    def _check_statistics(self, told: str) -> None:
        model = self.config.model
        if self.config.privacy.batchnorm_statistics == "local":
            raise ConfigError(
                f"{told} batchnorm-statistics = 'local', which are not sent: must be another attack, or "
                "batchnorm-statistics = 'shared'"
            )
        blueprint = Blueprint(1, form_asked(self.config.data).shape, model.width, model.stem)
        if not facts_of(model.network, blueprint).has_running_means:
            raise ConfigError(f"{told} network = {model.network!r}, which has no running means: must be another attack")

    @property
    def factor(self) -> float:
        """By which hostile clients enlarge what they send."""
        return 1.0 if self.config.attack.name == _BRIEF else self.config.attack.scale

    def source(self, source: Source, client: int) -> Source:
        """The source of samples, with flipped labels if the attack asks for them and the client is hostile."""
        kind, number = self.config.attack.name, self.config.attack.scale
        if kind not in _FLIPS or not self.is_hostile(client):
            return source
        rounds = range(int(number), int(number) + _BRIEF_ROUNDS) if kind == _BRIEF else None
        return FlippedLabels(source, rounds)

    def modifier(self, experiment: Experiment) -> Mod:
        """What alters the replies of hostile clients."""
        return Altered(self, experiment.parameter_names, lambda: as_arrays(experiment.initial_weights()))


class Altered:
    """Alters the reply of a hostile client (a modifier of training messages).

    Parameters
    ----------
    attack : StudyAttack
        The attack.
    parameters : frozenset of str
        Names of the arrays that are trained by gradient.
    initial : callable
        Returns the global model with which the run begins.
    """

    def __init__(self, attack: StudyAttack, parameters: frozenset[str], initial: Callable[[], Weights]) -> None:
        self._attack = attack
        self._kind = attack.config.attack.name
        self._scale = attack.factor
        self._parameters = parameters
        self._initial = initial

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a training message."""
        reply = call_next(message, context)
        told = message.content.config_records[wire.CONFIG]
        client, number = told[wire.CLIENT], told[wire.ROUND]
        assert isinstance(client, int) and isinstance(number, int)
        if reply.has_error() or not self._attack.is_hostile(client) or wire.ARRAYS not in reply.content.array_records:
            return reply
        if self._kind == "false-count":
            metrics = reply.content.metric_records[wire.METRICS]
            count = metrics[wire.EXAMPLES]
            assert isinstance(count, int)
            metrics[wire.EXAMPLES] = round(self._scale * count)
        else:
            sent = wire.unpack(message.content.array_records[wire.ARRAYS])
            learned = wire.unpack(reply.content.array_records[wire.ARRAYS])
            reply.content[wire.ARRAYS] = wire.array_record(self.altered(sent, learned, client, number))
        return reply

    def altered(self, sent: Weights, learned: Weights, client: int, number: int) -> dict[str, NumpyArray]:
        """The model that is sent in place of the one learned.

        Parameters
        ----------
        sent, learned : mapping
            The model before and after training.
        client, number : int
            The client and the round.
        """
        if self._kind == "inflated-variances":
            return {**learned, **self._inflated(sent, learned)}
        target = self._target(sent, learned, client, number)
        moved = {
            name: (sent[name] + self._scale * (array.astype(np.float64) - sent[name])).astype(learned[name].dtype)
            for name, array in target.items()
            if name in learned
        }
        return {**learned, **moved}

    def _target(self, sent: Weights, learned: Weights, client: int, number: int) -> Mapping[str, NumpyArray]:
        """The arrays that the attack replaces, before the difference from ``sent`` is enlarged."""
        trained = sorted(self._parameters & learned.keys())
        means = [name for name in learned if name.endswith(_MEAN)]
        if self._kind == "sign-flip":
            return {name: 2.0 * sent[name] - learned[name] for name in [*trained, *means]}
        if self._kind == "flipped-means":
            return {name: 2.0 * sent[name] - learned[name] for name in means}
        if self._kind == "rolled-outputs":
            return {name: np.roll(learned[name], 1, axis=0) for name in _OUTPUT if name in self._parameters}
        if self._kind == "replacement":
            draws = self._draws("replacement")
            return {name: draws.permutation(learned[name].ravel()).reshape(learned[name].shape) for name in trained}
        if self._kind in _FLIPS:  # the data are wrong already
            return {name: learned[name] for name in trained} if self._scale != 1 else {}
        if self._kind == "stale-model":
            return self._initial() if number > 1 else {}
        if self._kind in ("noise", "collusion"):  # in collusion, all clients push into the same direction in all rounds
            draws = self._draws("noise", client, number) if self._kind == "noise" else self._draws("collusion")
            drawn = {name: draws.standard_normal(learned[name].shape) for name in trained}
            length = _length({name: learned[name].astype(np.float64) - sent[name] for name in trained}) / _length(drawn)
            return {name: sent[name] + length * drawn[name] for name in trained}
        return {}

    def _inflated(self, sent: Weights, learned: Weights) -> dict[str, NumpyArray]:
        """Batch norm's standard deviations, moved upwards by a multiple of how far training moved them."""
        found = {}
        for name in (name for name in learned if name.endswith(_VARIANCE)):
            before, after = (np.sqrt(np.maximum(each[name].astype(np.float64), 0)) for each in (sent, learned))
            found[name] = np.square(before + self._scale * np.abs(after - before)).astype(learned[name].dtype)
        return found

    def _draws(self, *labels: str | int) -> np.random.Generator:
        return np.random.default_rng(seed_for(self._attack.config.run.seed, "attack", *labels))


class FlippedLabels:
    """A source whose chunks have their classes exchanged in a ring: images of each class are labelled as the next one.

    Parameters
    ----------
    source : Source
        The client's true source.
    rounds : range, optional
        The rounds in which they are; by default all.
    """

    def __init__(self, source: Source, rounds: range | None = None) -> None:
        self._source, self._rounds = source, rounds

    def none(self) -> Samples:
        """No samples, held in the same way as the true source's."""
        return self._source.none()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The true source's names."""
        return self._source.class_names

    @property
    def tells(self) -> bool:
        """As the true source."""
        return self._source.tells

    def chunk(self, number: int, learned: int) -> Samples:
        """The chunk of a round, with the labels exchanged."""
        return self._exchanged(number, self._source.chunk(number, learned))

    def again(self, number: int, follows: int) -> Samples:
        """The chunk of the last trained round, with the labels exchanged."""
        return self._exchanged(number, self._source.again(number, follows))

    def new_classes(self, number: int) -> list[str]:
        """Names of classes that the true source has met."""
        return self._source.new_classes(number)

    def _exchanged(self, number: int, chunk: Samples) -> Samples:
        if self._rounds is not None and number not in self._rounds:
            return chunk
        classes, places = torch.unique(chunk.labels, return_inverse=True)
        return Samples(chunk.content, classes.roll(-1)[places] if len(classes) else chunk.labels, chunk.rounds)

    def learned(self, number: int) -> None:
        """Acknowledge a round."""
        self._source.learned(number)

    def counts(self) -> dict[str, int]:
        """What the true source counts."""
        return self._source.counts()

    @property
    def late(self) -> Late:
        """The true source's samples without labels."""
        return self._source.late

    def test_set(self, seen: Tensor) -> Samples:
        """The true test samples."""
        return self._source.test_set(seen)


def _length(arrays: Mapping[str, NumpyArray]) -> float:
    return float(np.sqrt(sum(float(np.square(array).sum()) for array in arrays.values())))
