"""What a client's round and the hooks of its rule hand to each other."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedkace_flwr.messaging import records as keys
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.training.adam import Adam
from fedkace_flwr.training.batches import Batching
from fedkace_flwr.training.losses import Objective
from fedkace_flwr.training.stored_logits import StoredLogits

Array = npt.NDArray[Any]
Metrics = dict[str, Any]


@dataclass(frozen=True)
class ClientRound:
    """A client's round at its start.

    Attributes
    ----------
    number : int
        t, from 1.
    chunk : Samples
        D_t.
    state : ClientState
        The client's state at the end of its previous round; its buffer is M_{t-1}.
    current : Tensor
        bool (C,): the chunk's classes, C_t.
    sent : mapping of str to array
        Weights of the model that the server sent, by name; empty for methods that send none.
    """

    number: int
    chunk: Samples
    state: ClientState
    current: Tensor
    sent: Mapping[str, Array] = field(default_factory=dict)

    @property
    def old(self) -> Tensor:
        """Classes of earlier chunks, C_<t, bool (C,)."""
        return self.state.seen

    @property
    def seen(self) -> Tensor:
        """Classes of all chunks so far, C_<=t, bool (C,)."""
        return self.current | self.state.seen


@dataclass(frozen=True)
class Training:
    """One local training.

    Attributes
    ----------
    net : Network
        The network to train, in place.
    objective : Objective
        The loss; its tensors are on the experiment's device.
    settings : TrainingConfig
        Epochs, batch size, learning rate, weight decay, batching, augmentation and logit adjustment.
    generator : torch.Generator
        CPU generator that orders the samples.
    batching : str, optional
        A key of :data:`fedkace_flwr.training.batches.EPOCHS`; by default that of the settings.
    optimiser : Adam, optional
        By default a new AdamW.
    epochs : range, optional
        The epochs to run, from 0; by default all.
    after_step : callable, optional
        Called after each step with the epoch, from 1, and the share of its steps that are done.
    augmentation : torch.Generator, optional
        CPU generator of the images' random changes; needed where ``settings.augment`` asks for them.
    stored : StoredLogits, optional
        Logits of the buffer's samples, in their order, for a loss of their distance.
    captured : bool
        Whether to record the step as a CUDA graph where that is possible.
    """

    net: Network
    objective: Objective
    settings: TrainingConfig
    generator: torch.Generator
    batching: Batching | None = None
    optimiser: Adam | None = None
    epochs: range | None = None
    after_step: Callable[[int, float], None] | None = None
    augmentation: torch.Generator | None = None
    stored: StoredLogits | None = None
    captured: bool = False


@dataclass(frozen=True)
class Kept:
    """What a client keeps of a round.

    Attributes
    ----------
    buffer : Samples
        M_t.
    extra : mapping of str to Tensor
        CPU tensors to store in ``ClientState.extra``; they replace earlier ones of the same name.
    logits : Tensor, optional
        The local model's logits of the buffer, float32 (m, C), if the method has them; for its report.
    """

    buffer: Samples
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


@dataclass(frozen=True)
class Evaluation:
    """A test of the model that answers.

    Attributes
    ----------
    accuracy : float or None
        Share of right answers; None without test images.
    examples : int
        Number of test images.
    report : mapping
        Metrics beside the accuracies.
    classes : list of float
        Accuracy on each class, -1 for a class that was not tested; empty if it is not reported.
    """

    accuracy: float | None
    examples: int
    report: Mapping[str, Any] = field(default_factory=dict)
    classes: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Acted:
    """The result of a message of the method's own.

    Attributes
    ----------
    reply : RecordDict
        Content of the reply.
    state : ClientState, optional
        The new state, which is stored before the reply is sent.
    """

    reply: RecordDict
    state: ClientState | None = None


class Stopwatch:
    """Takes times.

    Attributes
    ----------
    started : float
        When it was made, seconds since the epoch.
    seconds : dict of str to float
        Seconds by purpose.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        """Add the time that the block takes."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] = self.seconds.get(purpose, 0.0) + time.perf_counter() - begun

    def times(self, wanted: Collection[str]) -> Metrics:
        """Seconds by purpose, start and end up to now, as far as they are wanted."""
        every = self.seconds | {keys.STARTED: self.started, keys.FINISHED: time.time()}
        return {name: value for name, value in every.items() if name in wanted}
