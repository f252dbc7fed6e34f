"""The client of FedKACE: balanced replay, kernel-scored buffer, inference switch (paper, section 4)."""

from dataclasses import replace

import torch
from flwr.app import RecordDict

from clients.base import ClientRound, ClientRule, Kept, Metrics, Training
from fedkace_flwr.algorithms.fedkace_buffer import (
    class_condition_number,
    kernel_beta,
    kernel_condition_number,
    score_candidates,
    select,
)
from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss, FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance
from fedkace_flwr.algorithms.fedkace_switch import InferenceSwitch
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.methods.fedkace import SINGULAR, FedKaceKeys
from fedkace_flwr.metrics import accuracy, true_class_probability
from fedkace_flwr.networks.network import Network
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.losses import Objective, TaskLoss

GAPS = "fedkace.gaps"
"""Stored tensor, float64 (n,): the gap of each evaluated round until the switch."""

_LARGEST_DIAGNOSED_BUFFER = 2000


class FedKaceClient(ClientRule):
    """The client side of the paper's Figure 1, from top to bottom."""

    def objective(self, net: Network, now: ClientRound) -> Objective:
        """Task loss plus replay loss, weighted by the ratio of output-layer gradient norms (section 4.2)."""
        settings, device = self.config.of(FedKaceKeys), self.experiment.device
        new, replayed = (now.current, now.old) if settings.replay_classes == "split" else (now.seen, now.seen)
        current, old = new.to(device), replayed.to(device)
        if settings.replay_weight == "one":
            return TaskLoss(current, old)
        sizes = {"task_size": len(now.chunk), "replay_size": max(1, len(now.state.buffer))}
        balance = GradientBalance(settings.gradient_norm, settings.lambda_max, **sizes)
        if settings.replay_gradient == "full":
            return FullGradientReplayLoss(current, old, balance, list(net.parameters()))
        return BalancedReplayLoss(current, old, balance, gradient_bias=settings.gradient_bias)

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Score the old buffer and the chunk with the local model, and select class by class (section 4.3)."""
        settings, capacity = self.config.of(FedKaceKeys), self.config.buffer.capacity
        candidates = now.state.buffer.followed_by(now.chunk)
        logits = self.logits(training.net, candidates, home=False)
        scores = score_candidates(
            logits,
            candidates.labels,
            len(now.state.buffer),
            now.old,
            now.seen,
            self_distance=settings.self_distance,
            landmarks=settings.landmarks,
            generator=self.generator("landmarks", now.number),
        )
        kept = select(
            scores,
            candidates.labels,
            capacity,
            now.old,
            now.seen,
            self.generator("selection", now.number),
            quota=settings.quota,
            leftover=settings.leftover,
            rule=settings.selection,
        )
        return Kept(candidates.take(kept), logits=logits[kept])

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Each epoch's replay weight, and the condition numbers of the new buffer's kernel matrices (Table 3)."""
        report = super().report(now, training, kept)
        objective, logits = training.objective, kept.logits
        if isinstance(objective, BalancedReplayLoss):
            report |= {keys.REPLAY_WEIGHTS: objective.weights, keys.REPLAY_SKIPPED: objective.balance.skipped}
        else:
            report[keys.REPLAY_WEIGHTS] = [1.0] * self.config.training.epochs
        if self.config.run.diagnostics and logits is not None and len(logits) <= _LARGEST_DIAGNOSED_BUFFER:
            beta = kernel_beta(len(now.state.buffer), int(now.seen.sum()))
            report |= {
                keys.CONDITION_NUMBER: min(SINGULAR, kernel_condition_number(logits, now.seen, beta)),
                keys.CLASS_CONDITION_NUMBER: min(
                    SINGULAR, class_condition_number(logits, kept.buffer.labels, now.seen, beta)
                ),
            }
        return report

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Compare the global model's accuracy and confidence on the buffer, until the switch (section 4.1)."""
        if self.config.answers.inference != "auto":
            return super().receive(net, state, round_number, content)
        if state.global_since is not None or len(state.buffer) == 0:
            return state, {}
        logits, labels = self.logits(net, state.buffer), state.buffer.labels
        correct, confident = (measure(logits, labels, state.seen) for measure in (accuracy, true_class_probability))
        gaps = state.extra[GAPS].tolist() if GAPS in state.extra else []
        switch = InferenceSwitch(self.config.of(FedKaceKeys).patience, gaps=gaps)
        switch.observe(correct, confident, round_number=round_number)
        report = {keys.BUFFER_ACCURACY: correct, keys.BUFFER_PROBABILITY: confident, keys.GAP: switch.gaps[-1]}
        extra = {**state.extra, GAPS: torch.tensor(switch.gaps, dtype=torch.float64)}
        return replace(state, global_since=switch.switched_at, extra=extra), report
