"""The client of TFCL (TagFed; Wang, Liu and Li, CVPR 2024): weights owned by rounds, distillation from the server."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.algorithms import tfcl_submodels as submodels
from fedkace_flwr.algorithms import tfcl_tags as tags
from fedkace_flwr.algorithms.tfcl_submodels import Extra
from fedkace_flwr.clients.base import (
    Acted,
    Array,
    ClientRound,
    ClientRule,
    Evaluation,
    Kept,
    Metrics,
    Training,
)
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, MessageError
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference.kept_models import Answering, labels_of
from fedkace_flwr.keys import key
from fedkace_flwr.messaging import wire
from fedkace_flwr.metrics import accuracy
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method, Traffic
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.distillation import DistilledLoss
from fedkace_flwr.training.loop import optimiser_of
from fedkace_flwr.training.optimisers import Optimiser

HEAD_ACTION, TAIL_ACTION = "train.head", "train.tail"
"""Actions of the exchange.

The first trains the first half of a round and returns what the server learns from; the second sends the server's
logits and trains the rest.
"""

FEATURES, LOGITS, LABELS, SEEN = "features", "logits", "labels", "seen"
"""Names of the arrays exchanged."""


LABEL_WEIGHT, TEMPERATURE, PICK_LEARNING_RATE = 0.9, 5.0, 1e-4
"""The publication's weight of the label loss beside distillation and its temperature, on both sides, and the learning
rate of Adam for the pick mask."""


@dataclass(frozen=True)
class TfclKeys:
    """TFCL."""

    tfcl_server_epochs: int = key(
        20, "Number of epochs that the server's network trains per round.", unit="epochs", low=1, living=True
    )

    def check(self, config: Config) -> None:
        """Check that TFCL's sub-models have output layers of their own, and all layers to train.

        Raises
        ------
        ConfigError
            The output layer is fixed, or a part of the network is frozen.
        """
        if config.method == "tfcl" and config.model.output_layer != "learned":
            raise ConfigError(
                f"output-layer = {config.model.output_layer!r}: TFCL's sub-models and its server learn their output "
                "layers; must be 'learned'"
            )
        if config.method == "tfcl" and config.model.trainable != "all":
            raise ConfigError(
                f"trainable = {config.model.trainable!r}: TFCL shares the weights of all layers out to its rounds; must be "
                "'all'"
            )


logger = logging.getLogger(__name__)

_BLOCK = 128

_PENDING = "pending."
_PICK, _STEPS = f"{_PENDING}pick", f"{_PENDING}steps"
_MOMENTS, _PICK_MOMENTS = f"{_PENDING}moments", f"{_PENDING}pick-moments"
_TAIL = "tail"


@dataclass(frozen=True, kw_only=True)
class HalfTraining(Training):
    """One half of a round's training.

    Attributes
    ----------
    task : int
        The task that is trained.
    claim : Claim
        Its weights in the network, and its pick mask.
    """

    task: int
    claim: tags.Claim


class TfclClient(ClientRule):
    """Claims the free weights, trains, sends features; trains on with the server's logits, prunes, keeps a sub-model.

    A round is a task. There is no buffer, and no model weights travel. Instead the client sends the label of every
    sample and its features after the network's lower half (of ResNet-18, the second residual stage); the method does not work without them.

    The state holds the tensors named in :mod:`fedkace_flwr.algorithms.tfcl_submodels`; between the two halves of a
    round also the optimisers' states, ``pending.*``; and the last second half's seconds and samples, ``tail``. A
    task adds N / 8 bytes, N the number of weights, and a ``rest``.

    Inferred, because the method was published for tasks of several rounds with the task known in tests:

    - every round opens a task, also where a chunk has the same classes as an earlier one;
    - a round's share of each layer is 1 / ``rounds``; the task is pruned to it within the round, in the last of
      ``epochs`` (the published code prunes in a task's second round; with a task per round the first one would claim
      everything, and later ones only pick);
    - the output layer starts from the run's initial weights, as published, batch normalisation from the previous
      round, free weights from 0;
    - the first half of ``epochs``, at least one, precedes the exchange; both halves share one cosine and the
      optimisers (with one epoch nothing is left to train after the exchange);
    - losses cover all classes seen and are averaged over the batch; the label loss is cross-entropy (the published
      code's is binary cross-entropy, averaged over the classes too);
    - the latest sub-model answers;
    - earlier rounds are not retrained, because their data are gone;
    - a client that receives no logits keeps its chunk until its next message, then ends the round with the label
      loss.

    There is no global model, so the key ``predict-with`` has no effect.
    """

    receives_model = False
    training_action = HEAD_ACTION
    training_times = frozenset({wire.TRAINING_SECONDS, wire.STARTED, wire.FINISHED})

    # The first half of a round

    def catch_up(self, state: ClientState, round_number: int) -> ClientState:
        """Finish an earlier round that received no logits, by its label loss."""
        return self._finished(state)

    def training(self, net: Network, now: ClientRound) -> HalfTraining:
        """The first half of the epochs, on the weights that the round claims."""
        begun = self._begun(net, now)
        claim = self._claim(net, begun)
        optimiser = optimiser_of(claim.net, self.config.training)
        return self._half(claim, optimiser, int(begun[submodels.TASK]), now, None, self._halves()[0], prunes=False)

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Keep what was learned, and the optimisers for the second half."""
        assert isinstance(training, HalfTraining) and training.optimiser is not None
        claim, task = training.claim, training.task
        weights, others, owners, pick = claim.read()
        pending = {
            _PICK: pick,
            _MOMENTS: tags.read_means(training.optimiser),
            _PICK_MOMENTS: tags.read_means(claim.pick_optimiser),
            _STEPS: torch.tensor(claim.steps),
        }
        known = {**now.state.extra, submodels.classes_of(task): now.current}
        return Kept(now.state.buffer, submodels.with_learned(known, task, weights, others, owners) | pending)

    def needs_local_test(self, state: ClientState) -> bool:
        """No: the round's model is not finished yet."""
        return False

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """An empty buffer."""
        return {wire.BUFFER_SIZE: 0}

    def reply(self, now: ClientRound, training: Training) -> dict[str, Array]:
        """Features, logits and labels of the chunk, and the classes seen."""
        logits, maps = self.logits(training.net, now.chunk), self._maps(training.net, now)
        arrays = {FEATURES: maps, LOGITS: logits, LABELS: now.chunk.labels, SEEN: now.seen}
        return {name: tensor.numpy() for name, tensor in arrays.items()}

    # The second half

    def act(self, action: str, content: RecordDict, round_number: int) -> Acted:
        """``train.tail``: finish the round with the server's logits; a round finished already is left alone.

        Raises
        ------
        MessageError
            The client has not begun the round, the logits do not fit, or the action is unknown.
        """
        if action != TAIL_ACTION:
            return super().act(action, content, round_number)
        state = self.store.before(round_number + 1)
        if state.round != round_number:
            raise MessageError(f"client {self.number} has no round {round_number} to finish")
        finished = self._finished(state, content)
        seconds, examples = finished.extra[_TAIL].tolist()
        reply = wire.reply_content(None, int(examples), {wire.TRAINING_SECONDS: seconds})
        return Acted(reply, finished if finished is not state else None)

    def _finished(self, state: ClientState, content: RecordDict | None = None) -> ClientState:
        """Train the second half of the state's round and prune; a finished round is returned as it is."""
        if _PICK not in state.extra:
            return state
        begun = time.perf_counter()
        task, steps = int(state.extra[submodels.TASK]), int(state.extra[_STEPS])
        chunk = self.source.again(state.round, state.follows)
        now = ClientRound(state.round, chunk, state, state.extra[submodels.classes_of(task)])
        teacher = self._teacher(content, len(chunk)) if content is not None else None
        claim = self._claim(self.network({}), state.extra)
        optimiser = optimiser_of(claim.net, self.config.training)
        tags.write_means(optimiser, state.extra[_MOMENTS], steps)
        tags.write_means(claim.pick_optimiser, state.extra[_PICK_MOMENTS], steps)
        self.train(
            self._half(claim, optimiser, task, now, teacher, self._halves()[1], prunes=True), chunk, state.buffer
        )
        claim.prune()

        weights, others, owners, pick = claim.read()
        known = {name: tensor for name, tensor in state.extra.items() if not name.startswith(_PENDING)}
        kept = submodels.with_learned(known, task, weights, others, owners)
        kept[submodels.pick_of(task)] = tags.pack_bits(pick > tags.PICK_THRESHOLD)
        kept[_TAIL] = torch.tensor([time.perf_counter() - begun, len(chunk)], dtype=torch.float64)
        return replace(state, extra=kept)

    # Inference

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Leave the state as it is: there is no global model."""
        return state, {}

    def evaluate(self, net: Network, state: ClientState) -> Evaluation:
        """Test the latest sub-model."""
        test = self.source.test_set(state.seen)
        scores = self.logits(self.sub_model(state.extra, int(state.extra[submodels.TASK])), test)
        if not len(test):
            return Evaluation(None, 0)
        correct = accuracy(scores, test.labels, state.seen)
        classes = self.class_accuracies(scores, test, state.seen)
        return Evaluation(correct, len(test), {wire.LOCAL_ACCURACY: correct}, classes)

    def answering(self, sent: Mapping[str, Array], state: ClientState) -> Answering:
        """The latest sub-model."""
        task = int(state.extra[submodels.TASK])
        name = f"task-{task}"
        return Answering(
            {name: as_arrays(self.sub_model(state.extra, task).state_dict())}, {name: labels_of(state.seen)}
        )

    def sub_model(self, extra: Extra, task: int) -> Network:
        """The network of a finished task: its own weights, and the weights of earlier tasks that it picked."""
        net = self.network({})
        tags.write_weights(net, submodels.effective_of(extra, task), extra[submodels.rest_of(task)])
        return net

    # Parts of both halves

    def _begun(self, net: Network, now: ClientRound) -> Extra:
        """The state with which a round starts: task, weights, tags, normalisation, output layer and mask."""
        extra = now.state.extra
        weights, others = tags.read_weights(net)
        owners = torch.full(weights.shape, now.number, dtype=torch.int16)
        if submodels.TAGS in extra:
            free = extra[submodels.TAGS] == tags.FREE
            if not bool(free.any()):
                logger.warning("client %d, round %d: no weight is left to claim", self.number, now.number)
            owners = torch.where(free, owners, extra[submodels.TAGS])
            weights = extra[submodels.WEIGHTS]  # free weights are 0
            before = extra[submodels.rest_of(int(extra[submodels.TASK]))]
            head = net.output.weight.numel() + net.output.bias.numel()  # at the end of the untagged values
            others = torch.cat([before[:-head], others[-head:]])
        return {
            submodels.TASK: torch.tensor(now.number),
            submodels.WEIGHTS: weights,
            submodels.TAGS: owners,
            submodels.rest_of(now.number): others,
            _PICK: torch.full(weights.shape, tags.PICK_START),
        }

    def _claim(self, net: Network, extra: Extra) -> tags.Claim:
        task = int(extra[submodels.TASK])
        return tags.Claim(
            net,
            extra[submodels.WEIGHTS],
            extra[submodels.rest_of(task)],
            extra[submodels.TAGS],
            task,
            extra[_PICK],
            rounds=self.config.stream.rounds,
            pick_rate=PICK_LEARNING_RATE,
        )

    def _halves(self) -> tuple[range, range]:
        epochs = self.config.training.epochs
        head = max(1, epochs // 2)
        return range(head), range(head, epochs)

    def _half(
        self,
        claim: tags.Claim,
        optimiser: Optimiser,
        task: int,
        now: ClientRound,
        teacher: Tensor | None,
        epochs: range,
        *,
        prunes: bool,
    ) -> HalfTraining:
        device = self.experiment.device
        objective = DistilledLoss(
            now.seen.expand(len(now.chunk), -1).to(device),
            None if teacher is None else teacher.to(device),
            weight=LABEL_WEIGHT,
            temperature=TEMPERATURE,
        )
        last = self.config.training.epochs if prunes else None
        return HalfTraining(
            claim.net,
            objective,
            self.config.training,
            self.generator(f"batches-{epochs.start}", now.number),
            optimiser=optimiser,
            epochs=epochs,
            after_step=lambda epoch, share: claim.after_step(share if epoch == last else None),
            augmentation=self.generator(f"augmentation-{epochs.start}", now.number),
            task=task,
            claim=claim,
        )

    @torch.inference_mode()
    def _maps(self, net: Network, now: ClientRound) -> Tensor:
        lower, blocks = net.lower_half().eval(), torch.split(self.images(now.chunk), _BLOCK)
        return torch.cat([lower(self.experiment.preprocess(block)).contiguous() for block in blocks]).cpu()

    def _teacher(self, content: RecordDict, examples: int) -> Tensor:
        shapes = {LOGITS: ((examples, self.experiment.num_classes), np.dtype(np.float32))}
        return torch.from_numpy(wire.read_arrays(content, shapes)[LOGITS])


METHOD = Method(
    TfclClient,
    "TFCL",
    server="fedkace_flwr.strategies.tfcl:Tfcl",
    keys=(TfclKeys,),
    actions=(HEAD_ACTION, TAIL_ACTION),
    sends_labels=True,
    splits=True,
    replays=False,
    traffic=Traffic("3*c + (4*n*C + 134)", "(4*n*A + 136) + (4*n*C + 134) + (8*n + 134) + (C + 132) + R"),
)
