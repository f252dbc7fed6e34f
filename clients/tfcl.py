"""The client of TFCL (TagFed; Wang, Liu and Li, CVPR 2024): weights that belong to rounds, distilled from the server."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from clients.base import ClientRound, ContinualClient, Stopwatch
from fedkace_flwr import messages as keys
from fedkace_flwr import tags
from fedkace_flwr.distillation import DistilledLoss, lower_half
from fedkace_flwr.errors import MessageError
from fedkace_flwr.metrics import accuracy
from fedkace_flwr.model import ResNet18
from fedkace_flwr.store import Answer, ClientState
from fedkace_flwr.training import adamw, train

Extra = Mapping[str, Tensor]
logger = logging.getLogger(__name__)

_BLOCK = 128


class TfclClient(ContinualClient):
    """Claim what is free, train, send features; train on by the server's logits, prune, keep a sub-model.

    A round is a task. There is no buffer, and no model weights travel. What travels instead tells the server
    every sample's label and its features after the second residual stage; the method cannot do without.

    State: ``weights`` and ``tags`` of all convolutions; for each round s its mask ``pick.s``, its batch
    normalisation and output layer ``rest.s``, and its classes ``classes.s``; between the two halves of a round
    also what the optimisers remember, ``pending.*``. A round adds N / 8 bytes, N the weights, and a ``rest``.

    Inferred, as the method was published for tasks of several rounds with the task known in tests: a round's
    share of each layer is 1 / ``rounds``; pruning within the round, in the last of ``epochs``; the first half of
    ``epochs``, at least one, before the exchange, both halves on one cosine with the optimisers kept (one epoch
    leaves nothing to train after the exchange); the output layer starts from the run's initial weights, batch
    normalisation from the round before, free weights from 0; losses over all classes met, averaged over the
    batch; label loss ``tfcl-loss`` (``bce``: as published, both losses are averaged over the classes too); which
    sub-model answers ``tfcl-inference``; no retraining of earlier rounds, whose data are gone. A client that
    gets no logits keeps its chunk until it is asked next, and ends its round by the label loss. There is no
    global model for ``inference`` to choose.
    """

    def act(self, action: str, content: RecordDict, round_number: int) -> RecordDict:
        """``train.head``: features, logits, labels, classes met. ``train.tail``: the server's logits come in."""
        if action == "train.head":
            answer = self.store.answer(round_number) or self._train_round([], round_number)
            return keys.reply_content(answer.arrays, answer.examples, answer.metrics)
        if action != "train.tail":
            return super().act(action, content, round_number)
        state = self.store.before(round_number + 1)
        if state.round != round_number:
            raise MessageError(f"client {self.number} has no round {round_number} to finish")
        state = self._finished(state, content)
        seconds, examples = state.extra["tail"].tolist()
        return keys.reply_content(None, int(examples), {keys.TRAINING_SECONDS: seconds})

    def _train_round(self, parameters: list[np.ndarray[Any, Any]], round_number: int) -> Answer:
        started, watch = time.time(), Stopwatch()
        state = self._finished(self.store.before(round_number))
        chunk = self.experiment.chunk(self.number, round_number)
        current = chunk.class_counts(self.experiment.num_classes) > 0
        now = ClientRound(round_number, chunk, state, current)
        with watch(keys.TRAINING_SECONDS):
            claim = self._claim(self._begun(now), round_number)
            optimiser = adamw(claim.net, self.config.training)
            self._learn(claim, now, optimiser, None, self._halves()[0])
        logits, maps = self.logits(claim.net, chunk), self._maps(claim.net, now)

        weights, others, owners, pick = claim.read()
        pending = {
            "pending.pick": pick,
            "pending.moments": tags.read_moments(optimiser),
            "pending.pick-moments": tags.read_moments(claim.pick_optimiser),
            "pending.steps": torch.tensor(claim.steps),
        }
        kept = {"weights": weights, "tags": owners, f"rest.{now.number}": others, f"classes.{now.number}": current}
        extra = {**state.extra, **kept, **pending}
        learned = replace(state, round=now.number, follows=state.round, seen=now.seen, extra=extra)
        report = {keys.BUFFER_SIZE: 0, **watch.seconds, keys.STARTED: started, keys.FINISHED: time.time()}
        arrays = {"features": maps, "logits": logits, "labels": chunk.labels, "seen": now.seen}
        answer = Answer({name: tensor.numpy() for name, tensor in arrays.items()}, len(chunk), report)
        self.store.save_trained(learned, answer)
        return answer

    def _finished(self, state: ClientState, content: RecordDict | None = None) -> ClientState:
        """Train the second half of the state's round, prune and store; a finished round is left alone."""
        if "pending.pick" not in state.extra:
            return state
        begun = time.perf_counter()
        chunk = self.experiment.chunk(self.number, state.round)
        now = ClientRound(state.round, chunk, state, state.extra[f"classes.{state.round}"])
        teacher = self._teacher(content, len(chunk)) if content is not None else None
        claim = self._claim(state.extra, now.number)
        optimiser, steps = adamw(claim.net, self.config.training), int(state.extra["pending.steps"])
        tags.write_moments(optimiser, state.extra["pending.moments"], steps)
        tags.write_moments(claim.pick_optimiser, state.extra["pending.pick-moments"], steps)
        self._learn(claim, now, optimiser, teacher, self._halves()[1])
        claim.prune()

        weights, others, owners, pick = claim.read()
        kept = {name: tensor for name, tensor in state.extra.items() if not name.startswith("pending.")}
        kept |= {"weights": weights, "tags": owners, f"rest.{now.number}": others}
        kept[f"pick.{now.number}"] = tags.pack_bits(pick > tags.PICK_THRESHOLD)
        kept["tail"] = torch.tensor([time.perf_counter() - begun, len(chunk)], dtype=torch.float64)
        state = replace(state, extra=kept)
        self.store.save(state)
        return state

    def _evaluate_round(
        self, parameters: list[np.ndarray[Any, Any]], state: ClientState, round_number: int
    ) -> ClientState:
        started, watch = time.time(), Stopwatch()
        state = self._finished(state)
        test = self.experiment.test_set(self.number, state.seen)
        with watch(keys.EVALUATION_SECONDS):
            if self.config.tfcl.tfcl_inference == "latest":
                scores = self.logits(self.sub_model(state.extra, state.round), test)
            else:
                scores = torch.zeros(len(test), self.experiment.num_classes)
                for task in sorted(int(name[5:]) for name in state.extra if name.startswith("pick.")):
                    logits = self.logits(self.sub_model(state.extra, task), test)
                    own = logits.masked_fill(~state.extra[f"classes.{task}"], -torch.inf)
                    scores = torch.maximum(scores, own.softmax(dim=1))
        correct = accuracy(scores, test.labels, state.seen)
        report = {keys.LOCAL_ACCURACY: correct, keys.ACCURACY: correct, keys.SEEN_CLASSES: int(state.seen.sum())}
        report |= {keys.EXAMPLES: len(test), **watch.seconds, keys.STARTED: started, keys.FINISHED: time.time()}
        return replace(state, evaluated=round_number, evaluation=report)

    def sub_model(self, extra: Extra, task: int) -> ResNet18:
        """The network of a finished round: its own weights, and those of earlier rounds that it picked."""
        net, weights = self._network([]), extra["weights"]
        picked = tags.unpack_bits(extra[f"pick.{task}"], len(weights)).float()
        tags.write_weights(net, tags.effective_weights(weights, extra["tags"], task, picked), extra[f"rest.{task}"])
        return net

    def _network(self, parameters: list[np.ndarray[Any, Any]]) -> ResNet18:
        return self.experiment.network(self.experiment.initial_weights())

    def _begun(self, now: ClientRound) -> Extra:
        """Weights, tags, batch normalisation, output layer and mask with which a round begins."""
        net, extra = self._network([]), now.state.extra
        weights, others = tags.read_weights(net)
        if "tags" not in extra:
            owners = torch.full(weights.shape, now.number, dtype=torch.int16)
        else:
            free = extra["tags"] == tags.FREE
            if not bool(free.any()):
                logger.warning("client %d, round %d: no weight is left to claim", self.number, now.number)
            owners = torch.where(free, now.number, extra["tags"]).to(torch.int16)
            weights = extra["weights"]  # what is free is 0
            before = extra[f"rest.{now.state.round}"]
            head = net.output.weight.numel() + net.output.bias.numel()  # at the end of what is not tagged
            others = torch.cat([before[:-head], others[-head:]])
        pick = torch.full(weights.shape, tags.PICK_START)
        return {"weights": weights, "tags": owners, f"rest.{now.number}": others, "pending.pick": pick}

    def _claim(self, extra: Extra, task: int) -> tags.Claim:
        return tags.Claim(
            self._network([]),
            extra["weights"],
            extra[f"rest.{task}"],
            extra["tags"],
            task,
            extra["pending.pick"],
            rounds=self.config.stream.rounds,
            pick_rate=self.config.tfcl.tfcl_pick_learning_rate,
        )

    def _halves(self) -> tuple[range, range]:
        epochs = self.config.training.epochs
        head = max(1, epochs // 2)
        return range(head), range(head, epochs)

    def _learn(
        self, claim: tags.Claim, now: ClientRound, optimiser: torch.optim.Adam, teacher: Tensor | None, epochs: range
    ) -> None:
        settings, device = self.config.tfcl, self.experiment.device
        objective = DistilledLoss(
            now.seen.expand(len(now.chunk), -1).to(device),
            None if teacher is None else teacher.to(device),
            weight=settings.tfcl_label_weight,
            temperature=settings.tfcl_temperature,
            kind=settings.tfcl_loss,
        )
        last = self.config.training.epochs if epochs.start > 0 else None
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
        blocks = torch.split(now.chunk.content, _BLOCK)
        maps = [lower(self.experiment.preprocess(fetch(block))).contiguous().cpu() for block in blocks]
        return torch.cat(maps)

    def _teacher(self, content: RecordDict, examples: int) -> Tensor:
        shapes = {"logits": ((examples, self.experiment.num_classes), np.dtype(np.float32))}
        record = content.array_records.get(keys.ARRAYS)
        if record is None:
            raise MessageError(f"the message holds no record {keys.ARRAYS!r}")
        return torch.from_numpy(keys.checked_arrays(record, shapes)["logits"].copy())
