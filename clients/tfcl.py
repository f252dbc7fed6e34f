"""The client of TFCL (TagFed; Wang, Liu and Li, CVPR 2024): weights that belong to rounds, distilled from the server."""

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from clients.base import ClientRound, ContinualClient, Metrics, Stopwatch
from fedkace_flwr.algorithms import tfcl_submodels as submodels
from fedkace_flwr.algorithms import tfcl_tags as tags
from fedkace_flwr.algorithms.tfcl_submodels import Extra
from fedkace_flwr.errors import MessageError
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference.kept_models import Answering
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods import tfcl as names
from fedkace_flwr.methods.tfcl import TfclKeys
from fedkace_flwr.metrics import accuracy
from fedkace_flwr.storage.client_store import Answer, ClientState
from fedkace_flwr.training.distillation import DistilledLoss, lower_half
from fedkace_flwr.training.loop import adamw, train
from fedkace_flwr.training.model import ResNet18

logger = logging.getLogger(__name__)

_BLOCK = 128

_PENDING = "pending."
_PICK, _STEPS = f"{_PENDING}pick", f"{_PENDING}steps"
_MOMENTS, _PICK_MOMENTS = f"{_PENDING}moments", f"{_PENDING}pick-moments"
_TAIL = "tail"


class TfclClient(ContinualClient):
    """Claim what is free, train, send features; train on by the server's logits, prune, keep a sub-model.

    A round is a task. There is no buffer, and no model weights travel. What travels instead tells the server
    every sample's label and its features after the second residual stage; the method cannot do without.

    State: what :mod:`fedkace_flwr.algorithms.tfcl_submodels` names; between the two halves of a round also what the optimisers
    remember, ``pending.*``; the last second half's seconds and samples, ``tail``. A task adds N / 8 bytes, N the
    weights, and a ``rest``.

    Inferred, as the method was published for tasks of several rounds with the task known in tests:

    - a round's share of each layer is 1 / ``rounds``, to which it is pruned within the round, in the last of
      ``epochs`` (``tfcl-prune``; ``literal``: not in a task's first round, as in the published code, so that
      with a task per round the first claims everything and later ones only pick);
    - every round opens a task (``tfcl-trace``; ``class-set``: a chunk of the same classes as an earlier one's
      goes on with that task's weights, normalisation, output layer and mask, of which only the bits were kept, and
      claims nothing; a task that is not the newest trains a copy of its weights, as in the published code);
    - the output layer starts from the run's initial weights, as published (``tfcl-head``; ``copy``: as it was at the
      end of the round before), batch normalisation from the round before, free weights from 0;
    - the first half of ``epochs``, at least one, before the exchange, both halves on one cosine with the optimisers
      kept (one epoch leaves nothing to train after the exchange);
    - losses over all classes met, averaged over the batch; label loss ``tfcl-loss`` (``bce``: as published, both
      losses are averaged over the classes too);
    - which sub-model answers, ``tfcl-inference``: the latest is the one trained last;
    - no retraining of earlier rounds, whose data are gone;
    - a client that gets no logits keeps its chunk until it is asked next, and ends its round by the label loss.

    There is no global model for ``inference`` to choose.
    """

    def act(self, action: str, content: RecordDict, round_number: int) -> RecordDict:
        """``train.head``: features, logits, labels, classes met. ``train.tail``: the server's logits come in."""
        if action == names.HEAD_ACTION:
            answer = self.store.answer(round_number) or self._train_round([], round_number)
            return keys.reply_content(answer.arrays or None, answer.examples, answer.metrics)
        if action != names.TAIL_ACTION:
            return super().act(action, content, round_number)
        state = self.store.before(round_number + 1)
        if state.round != round_number:
            raise MessageError(f"client {self.number} has no round {round_number} to finish")
        state = self._finished(state, content)
        seconds, examples = state.extra[_TAIL].tolist()
        return keys.reply_content(None, int(examples), {keys.TRAINING_SECONDS: seconds})

    def _train_round(self, parameters: list[np.ndarray[Any, Any]], round_number: int) -> Answer:
        started, watch = time.time(), Stopwatch()
        state = self._finished(self.store.before(round_number))
        chunk = self.source.chunk(round_number, state.round)
        if not len(chunk):
            return Answer({}, 0, {keys.SAT_OUT: 1})
        current = chunk.class_counts(self.experiment.num_classes) > 0
        now = ClientRound(round_number, chunk, state, current)
        begun = self._begun(now)
        task = int(begun[submodels.TASK])
        with watch(keys.TRAINING_SECONDS):
            claim = self._claim(begun)
            optimiser = adamw(claim.net, self.config.training)
            self._learn(claim, now, optimiser, None, self._halves()[0], prunes=False)
        logits, maps = self.logits(claim.net, chunk), self._maps(claim.net, now)

        weights, others, owners, pick = claim.read()
        known = {**state.extra, submodels.classes_of(task): current}
        pending = {
            _PICK: pick,
            _MOMENTS: tags.read_moments(optimiser),
            _PICK_MOMENTS: tags.read_moments(claim.pick_optimiser),
            _STEPS: torch.tensor(claim.steps),
        }
        kept = submodels.with_learned(known, task, weights, others, owners) | pending
        learned = replace(state, round=now.number, follows=state.round, seen=now.seen, extra=kept)
        report = {keys.BUFFER_SIZE: 0, **watch.seconds, keys.STARTED: started, keys.FINISHED: time.time()}
        arrays = {names.FEATURES: maps, names.LOGITS: logits, names.LABELS: chunk.labels, names.SEEN: now.seen}
        answer = Answer({name: tensor.numpy() for name, tensor in arrays.items()}, len(chunk), report)
        self._keep(learned, answer)
        return answer

    def _finished(self, state: ClientState, content: RecordDict | None = None) -> ClientState:
        """Train the second half of the state's round, prune and store; a finished round is left alone."""
        if _PICK not in state.extra:
            return state
        begun = time.perf_counter()
        task, steps = int(state.extra[submodels.TASK]), int(state.extra[_STEPS])
        chunk = self.source.chunk(state.round, state.round)
        now = ClientRound(state.round, chunk, state, state.extra[submodels.classes_of(task)])
        teacher = self._teacher(content, len(chunk)) if content is not None else None
        claim = self._claim(state.extra)
        optimiser = adamw(claim.net, self.config.training)
        tags.write_moments(optimiser, state.extra[_MOMENTS], steps)
        tags.write_moments(claim.pick_optimiser, state.extra[_PICK_MOMENTS], steps)
        prunes = self._prunes(state.extra, task, state.round)
        self._learn(claim, now, optimiser, teacher, self._halves()[1], prunes=prunes)
        if prunes:
            claim.prune()

        weights, others, owners, pick = claim.read()
        known = {name: tensor for name, tensor in state.extra.items() if not name.startswith(_PENDING)}
        kept = submodels.with_learned(known, task, weights, others, owners)
        kept[submodels.pick_of(task)] = tags.pack_bits(pick > tags.PICK_THRESHOLD)
        kept[_TAIL] = torch.tensor([time.perf_counter() - begun, len(chunk)], dtype=torch.float64)
        state = replace(state, extra=kept)
        self.store.save(state)
        return state

    def _evaluate_round(
        self, parameters: list[np.ndarray[Any, Any]], state: ClientState, round_number: int
    ) -> ClientState:
        started, watch = time.time(), Stopwatch()
        state = self._finished(state)
        test = self.source.test_set(state.seen)
        with watch(keys.EVALUATION_SECONDS):
            if self.config.of(TfclKeys).tfcl_inference == "latest":
                scores = self.logits(self.sub_model(state.extra, int(state.extra[submodels.TASK])), test)
            else:
                scores = torch.zeros(len(test), self.experiment.num_classes)
                for task in submodels.finished(state.extra):
                    logits = self.logits(self.sub_model(state.extra, task), test)
                    own = logits.masked_fill(~state.extra[submodels.classes_of(task)], -torch.inf)
                    scores = torch.maximum(scores, own.softmax(dim=1))
        report: Metrics = {keys.SEEN_CLASSES: int(state.seen.sum())}
        if len(test):
            report |= dict.fromkeys((keys.LOCAL_ACCURACY, keys.ACCURACY), accuracy(scores, test.labels, state.seen))
        report |= {keys.EXAMPLES: len(test), **watch.seconds, keys.STARTED: started, keys.FINISHED: time.time()}
        return replace(state, evaluated=round_number, evaluation=report)

    def answering(self, parameters: list[np.ndarray[Any, Any]], state: ClientState) -> Answering:
        """The latest sub-model, or all of them, each for its task's classes."""
        extra = state.extra
        if self.config.of(TfclKeys).tfcl_inference == "latest":
            answers = {int(extra[submodels.TASK]): state.seen}
        else:
            answers = {task: extra[submodels.classes_of(task)] for task in submodels.finished(extra)}
        weights = {f"task-{task}": as_arrays(self.sub_model(extra, task).state_dict()) for task in answers}
        return Answering(weights, {f"task-{task}": classes for task, classes in answers.items()})

    def sub_model(self, extra: Extra, task: int) -> ResNet18:
        """The network of a finished task: its own weights, and those of earlier tasks that it picked."""
        net = self._network([])
        tags.write_weights(net, submodels.effective_of(extra, task), extra[submodels.rest_of(task)])
        return net

    def _network(self, parameters: list[np.ndarray[Any, Any]]) -> ResNet18:
        return self.experiment.network(self.experiment.initial_weights())

    def _begun(self, now: ClientRound) -> Extra:
        """With what a round begins: its task, weights, tags, batch normalisation, output layer and mask."""
        extra = now.state.extra
        earlier = (
            submodels.task_with(extra, now.current) if self.config.of(TfclKeys).tfcl_trace == "class-set" else None
        )
        if earlier is not None:
            picked = tags.unpack_bits(extra[submodels.pick_of(earlier)], len(extra[submodels.WEIGHTS]))
            return {**extra, submodels.TASK: torch.tensor(earlier), _PICK: tags.mask_of(picked)}
        net = self._network([])
        weights, others = tags.read_weights(net)
        owners = torch.full(weights.shape, now.number, dtype=torch.int16)
        if submodels.TAGS in extra:
            free = extra[submodels.TAGS] == tags.FREE
            if not bool(free.any()):
                logger.warning("client %d, round %d: no weight is left to claim", self.number, now.number)
            owners = torch.where(free, owners, extra[submodels.TAGS])
            weights = extra[submodels.WEIGHTS]  # what is free is 0
            before = extra[submodels.rest_of(int(extra[submodels.TASK]))]
            head = net.output.weight.numel() + net.output.bias.numel()  # at the end of what is not tagged
            fresh = self.config.of(TfclKeys).tfcl_head == "fresh"
            others = torch.cat([before[:-head], others[-head:]]) if fresh else before
        return {
            submodels.TASK: torch.tensor(now.number),
            submodels.WEIGHTS: weights,
            submodels.TAGS: owners,
            submodels.rest_of(now.number): others,
            _PICK: torch.full(weights.shape, tags.PICK_START),
        }

    def _claim(self, extra: Extra) -> tags.Claim:
        task = int(extra[submodels.TASK])
        return tags.Claim(
            self._network([]),
            submodels.weights_of(extra, task),
            extra[submodels.rest_of(task)],
            extra[submodels.TAGS],
            task,
            extra[_PICK],
            rounds=self.config.stream.rounds,
            pick_rate=self.config.of(TfclKeys).tfcl_pick_learning_rate,
        )

    def _prunes(self, extra: Extra, task: int, round_number: int) -> bool:
        """Whether a task gives weights back in this round; never once a later task may have picked among them."""
        first = task == round_number
        return (
            first
            if self.config.of(TfclKeys).tfcl_prune == "within-round"
            else not first and submodels.is_newest(extra, task)
        )

    def _halves(self) -> tuple[range, range]:
        epochs = self.config.training.epochs
        head = max(1, epochs // 2)
        return range(head), range(head, epochs)

    def _learn(
        self,
        claim: tags.Claim,
        now: ClientRound,
        optimiser: torch.optim.Adam,
        teacher: Tensor | None,
        epochs: range,
        *,
        prunes: bool,
    ) -> None:
        settings, device = self.config.of(TfclKeys), self.experiment.device
        objective = DistilledLoss(
            now.seen.expand(len(now.chunk), -1).to(device),
            None if teacher is None else teacher.to(device),
            weight=settings.tfcl_label_weight,
            temperature=settings.tfcl_temperature,
            kind=settings.tfcl_loss,
        )
        last = self.config.training.epochs if prunes else None
        train(
            claim.net,
            (now.chunk.images(self.experiment.dataset.fetch), now.chunk.labels),
            (now.state.buffer.images(self.experiment.dataset.fetch), now.state.buffer.labels),
            objective,
            self.config.training,
            self.experiment.preprocess,
            self.generator(f"batches-{epochs.start}", now.number),
            optimiser=optimiser,
            epochs=epochs,
            after_step=lambda epoch, share: claim.after_step(share if epoch == last else None),
        )

    @torch.inference_mode()
    def _maps(self, net: ResNet18, now: ClientRound) -> Tensor:
        lower, fetch = lower_half(net).eval(), self.experiment.dataset.fetch
        blocks = torch.split(now.chunk.images(fetch), _BLOCK)
        maps = [lower(self.experiment.preprocess(block)).contiguous().cpu() for block in blocks]
        return torch.cat(maps)

    def _teacher(self, content: RecordDict, examples: int) -> Tensor:
        shapes = {names.LOGITS: ((examples, self.experiment.num_classes), np.dtype(np.float32))}
        record = content.array_records.get(keys.ARRAYS)
        if record is None:
            raise MessageError(f"the message holds no record {keys.ARRAYS!r}")
        return torch.from_numpy(keys.checked_arrays(record, shapes)[names.LOGITS].copy())
