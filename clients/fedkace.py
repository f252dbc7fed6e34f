"""The client of FedKACE: balanced replay, kernel-scored buffer, inference switch (paper, section 4)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from flwr.app import RecordDict

from fedkace_flwr.algorithms.fedkace_buffer import (
    class_condition_number,
    kernel_beta,
    kernel_condition_number,
    score_candidates,
    select,
)
from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss, FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance
from fedkace_flwr.algorithms.fedkace_switch import gap_of, has_shrunk
from fedkace_flwr.clients.base import ClientRound, ClientRule, Kept, Metrics, Training
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import Number, Scalar, key, word_of
from fedkace_flwr.messaging.metrics import EPOCHS, Bound, Metric
from fedkace_flwr.metrics import accuracy, true_class_probability
from fedkace_flwr.networks.network import Network
from fedkace_flwr.registry import Method
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.losses import Objective, TaskLoss

GAP = "gap"
BUFFER_ACCURACY, BUFFER_PROBABILITY = "buffer-accuracy", "buffer-probability"
REPLAY_WEIGHTS, REPLAY_SKIPPED = "replay-weights", "replay-ratios-skipped"
CONDITION_NUMBER, CLASS_CONDITION_NUMBER = "condition-number", "class-condition-number"
"""Names of the metrics."""

_SHARE = 1 + 1e-6  # rounding may push a mean of probabilities slightly above 1
SINGULAR = 1e300
"""Condition number reported for a matrix that is singular in float64; messages and records hold finite numbers only."""


@dataclass(frozen=True)
class FedKaceKeys:
    """FedKACE."""

    gradient_norm: Literal["sum", "mean", "sum-with-bias", "mean-with-bias"] = key(
        "sum",
        "Reading: take the gradients of losses summed over each set (`sum`, the literal equations) or averaged per sample (`mean`), and of the output layer's weight alone or `with-bias`.",
    )
    lambda_max: float = key(10000.0, "Reading: the replay weight is clipped to [0, lambda-max].", above=0)
    replay_classes: Literal["split", "seen"] = key(
        "split",
        "Reading: classes among which training distinguishes. `split`: the chunk's for new samples and those of earlier chunks for replayed ones (equations 5 and 6); `seen`: all classes met so far for both (section A.3).",
    )
    replay_weight: Literal["balanced", "balanced-full", "one"] = key(
        "balanced",
        "Weight of the replay loss: set by the balance of the output layer's gradients (`balanced`), or of the whole model's at the cost of two more backward passes (`balanced-full`, ablation AS5), or always 1 (`one`, ablation AS4).",
    )
    self_distance: Literal["include", "exclude"] = key(
        "include",
        "Reading: whether a buffered sample may be its own nearest neighbour (`include`: its diversity is 0) or not (`exclude`).",
    )
    quota: Literal["met", "all"] = key(
        "met",
        "Reading: classes among which the buffer's places are divided evenly: those `met` so far (section 4.3), or `all` classes from the first round, so that a class's share never changes.",
    )
    leftover: Literal["drop", "fill"] = key(
        "drop",
        "Reading: places left over by floor(M / classes) and by classes with few samples stay empty (`drop`) or go to other classes (`fill`).",
    )
    selection: str = key(
        "hbms",
        "How FedKACE selects its buffer: in both stages (`hbms`), by information for every class (`information`, ablation AS6), or at random class by class (`random`, ablation AS7). The number is that of uniformly drawn buffer samples to score against if the buffer is larger; 0, the default: all.",
        words={"hbms": (Number("landmarks", 0, low=0),), "information": (Number("landmarks", 0, low=0),), "random": ()},
    )
    patience: int = key(
        2,
        "Reading: number of consecutive rounds in which the gap must shrink before a client switches.",
        unit="rounds",
        low=1,
    )

    def check(self, config: Config) -> None:
        """Refuse two rules for places.

        Raises
        ------
        ConfigError
            ``quota = all`` together with ``leftover = fill``.
        """
        if self.quota == "all" and self.leftover == "fill":
            raise ConfigError(
                "leftover = 'fill' with quota = 'all': would give the places of classes not yet met to the others; must "
                "be 'drop'"
            )


METRICS = (
    Metric(
        GAP,
        "FedKACE: difference between the global model's accuracy on the buffer and its mean probability of the true class; it decides when a client switches.",
        phase="evaluation",
        high=_SHARE,
        column="gap",
        tag="gap",
        average="gap",
    ),
    Metric(
        BUFFER_ACCURACY,
        "FedKACE: accuracy of the global model on the buffer.",
        phase="evaluation",
        high=_SHARE,
        column="buffer_accuracy",
        average="buffer_accuracy",
    ),
    Metric(
        BUFFER_PROBABILITY,
        "FedKACE: mean probability that the global model assigns to the true class of the buffer's samples.",
        phase="evaluation",
        high=_SHARE,
        column="buffer_probability",
        average="buffer_probability",
    ),
    Metric(
        REPLAY_WEIGHTS,
        "FedKACE: weight of the replay loss in each epoch; 1 in the first epoch.",
        high=Bound("max(1, `lambda-max`)", lambda limits: max(1.0, limits.config.of(FedKaceKeys).lambda_max)),
        length="epochs",
        column="replay_weights",
        tag="replay_weight",
        average="replay_weight",
    ),
    Metric(
        REPLAY_SKIPPED,
        "FedKACE: number of epochs whose ratio of gradient norms was not finite, so that the replay weight did not change.",
        high=EPOCHS,
        whole=True,
        unit="epochs",
        column="replay_ratios_skipped",
    ),
    Metric(
        CONDITION_NUMBER,
        "FedKACE: condition number of the new buffer's kernel matrix, 1e+300 if the matrix is singular; reported only with `diagnostics`.",
        high=SINGULAR,
        column="condition_number",
        tag="condition_number",
        average="condition_number",
        average_by="median",
    ),
    Metric(
        CLASS_CONDITION_NUMBER,
        "FedKACE: mean over classes of the condition number of each class's own kernel matrix (section B.4), 1e+300 if one of the matrices is singular; reported only with `diagnostics`.",
        high=SINGULAR,
        column="class_condition_number",
        tag="class_condition_number",
        average="class_condition_number",
        average_by="median",
    ),
)
"""Properties of the new buffer."""


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
        norm, _, bias = settings.gradient_norm.partition("-")
        balance = GradientBalance(norm, settings.lambda_max, **sizes)
        if settings.replay_weight == "balanced-full":
            return FullGradientReplayLoss(current, old, balance, list(net.parameters()))
        return BalancedReplayLoss(current, old, balance, gradient_bias=bool(bias))

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Score the old buffer and the chunk with the local model, and select class by class (section 4.3)."""
        settings, capacity = self.config.of(FedKaceKeys), self.config.buffer.capacity
        rule, numbers = word_of(settings, "selection")
        candidates = now.state.buffer.followed_by(now.chunk)
        logits = self.logits(training.net, candidates, home=False)
        scores = score_candidates(
            logits,
            candidates.labels,
            len(now.state.buffer),
            now.old,
            now.seen,
            self_distance=settings.self_distance,
            landmarks=int(numbers.get("landmarks", 0)),
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
            rule=rule,
        )
        return Kept(candidates.take(kept), logits=logits[kept])

    def report(self, now: ClientRound, training: Training, kept: Kept) -> Metrics:
        """Each epoch's replay weight, and the condition numbers of the new buffer's kernel matrices (Table 3)."""
        report = super().report(now, training, kept)
        objective, logits = training.objective, kept.logits
        if isinstance(objective, BalancedReplayLoss):
            report |= {REPLAY_WEIGHTS: objective.weights, REPLAY_SKIPPED: objective.balance.skipped}
        else:
            report[REPLAY_WEIGHTS] = [1.0] * self.config.training.epochs
        if self.config.run.diagnostics and logits is not None and len(logits) <= _LARGEST_DIAGNOSED_BUFFER:
            beta = kernel_beta(len(now.state.buffer), int(now.seen.sum()))
            report |= {
                CONDITION_NUMBER: min(SINGULAR, kernel_condition_number(logits, now.seen, beta)),
                CLASS_CONDITION_NUMBER: min(
                    SINGULAR, class_condition_number(logits, kept.buffer.labels, now.seen, beta)
                ),
            }
        return report

    def receive(
        self, net: Network, state: ClientState, round_number: int, content: RecordDict
    ) -> tuple[ClientState, Metrics]:
        """Compare the global model's accuracy and confidence on the buffer, until the switch (section 4.1).

        A round that is held brings no new model to compare.
        """
        if self.config.answers.predict_with != "auto":
            return super().receive(net, state, round_number, content)
        if state.global_since is not None or state.is_undone or len(state.buffer) == 0:
            return state, {}
        logits, labels = self.logits(net, state.buffer), state.buffer.labels
        correct, confident = (measure(logits, labels, state.seen) for measure in (accuracy, true_class_probability))
        gaps = state.extra[GAPS].tolist() if GAPS in state.extra else []
        gaps.append(gap_of(correct, confident))
        since = round_number if has_shrunk(gaps, self.config.of(FedKaceKeys).patience) else None
        report = {BUFFER_ACCURACY: correct, BUFFER_PROBABILITY: confident, GAP: gaps[-1]}
        extra = {**state.extra, GAPS: torch.tensor(gaps, dtype=torch.float64)}
        return replace(state, global_since=since, extra=extra), report


METHOD = Method(
    FedKaceClient,
    "FedKACE",
    server="fedkace_flwr.strategies.fedkace:FedKace",
    role="method",
    keys=(FedKaceKeys,),
    metrics=METRICS,
    is_mean=True,
    switches=True,
    tests=2,
)


def _ablation(label: str, preset: Mapping[str, Scalar], **changed: Any) -> Method:
    return replace(METHOD, label=label, role="ablation", preset=preset, **changed)


LKC = _ablation("LKC", {}, server="fedkace_flwr.strategies.fedkace:Unaggregated", is_mean=False)
AS1 = _ablation("AS1", {"patience": 1})
AS2 = _ablation("AS2", {"predict-with": "global"})
AS3 = _ablation("AS3", {"predict-with": "local"})
AS4 = _ablation("AS4", {"replay-weight": "one"})
AS5 = _ablation("AS5", {"replay-weight": "balanced-full"})
AS6 = _ablation("AS6", {"selection": "information"})
AS7 = _ablation("AS7", {"selection": "random"})
AS8 = _ablation("AS8", {"replay-weight": "one", "selection": "random"})
"""The ablations of section 5.3."""
