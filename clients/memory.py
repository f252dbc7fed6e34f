"""What a client takes along from one run to the next: its buffer and the classes that it has met, by their names."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedkace_flwr.algorithms.class_balance import class_balanced
from fedkace_flwr.clients import late
from fedkace_flwr.config import Config
from fedkace_flwr.errors import StateError
from fedkace_flwr.messaging import wire
from fedkace_flwr.registry import METHODS
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.storage.client_state import UNDONE, ClientState, within
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.storage.names import printable

logger = logging.getLogger(__name__)

_SHOWN = 10
_MEMORY = ("seen", "buffer", "global_since", "local_accuracy", "local_class_accuracy")


def memory_of(config: Config, client: int) -> Callable[[ClientState, ClientState], ClientState] | None:
    """How a run makes its first state from the newest one of an earlier run; None if it starts afresh."""
    return partial(_remembered, config=config, client=client) if config.keeps_memory else None


def joined(state: ClientState, names: Sequence[str], config: Config, client: int) -> ClientState:
    """The state with the waiting classes that the run has names for; the same object if there are none.

    Their samples come into the buffer, if the method replays; if there are then more than ``capacity``, as equal
    numbers of each class as possible are drawn from all of them.

    Parameters
    ----------
    state : ClientState
        A state of this run.
    names : sequence of str
        The names of the run's classes so far, in the order of their labels.
    config : Config
        The run's configuration.
    client : int
        The client's number.
    """
    labels = {name: label for label, name in enumerate(names)}
    waiting = state.waiting_names
    known = [name for name in waiting if name in labels]
    seen = state.seen.clone()
    for name in known:
        seen[labels[name]] = True
    if not METHODS[config.method].replays:
        return state if torch.equal(seen, state.seen) else replace(state, seen=seen)
    if not known:
        return state
    coming, buffer, capacity = _renamed(state.waiting, waiting, labels), state.buffer, config.buffer.capacity
    if len(coming):  # else it may be of another kind
        buffer = buffer.followed_by(coming)
    if len(buffer) > capacity:
        generator = generator_for(config.run.seed, "memory", client, state.round)
        buffer = buffer.take(class_balanced(buffer.labels, capacity, generator))
    left = unnamed(state, names)
    stays = _renamed(state.waiting, waiting, {name: place for place, name in enumerate(left)})
    return replace(state, seen=seen, buffer=buffer, waiting=stays, waiting_names=left)


def undone(state: ClientState, told: Mapping[str, Any], store: ClientStore) -> ClientState:
    """The state without the rounds that a message of the server counts as undone; the same object if there are none.

    If the last trained round is one of them, buffer, classes met and what the method stores are those from before it,
    unless these are damaged. Samples that arrived in undone rounds leave the buffer, and classes that were met in no
    other round have not been met.

    Raises
    ------
    MessageError
        The message names no rounds.
    """
    spans = torch.tensor(wire.undone_rounds(told), dtype=torch.int64).reshape(-1, 2)
    number = torch.tensor([state.round])
    if bool((within(number, spans) & ~within(number, state.undone)).any()):
        with suppress(StateError):
            before = store.before(state.round)
            memory = {name: getattr(before, name) for name in _MEMORY}
            state = replace(state, **memory, extra=late.carried(before.extra, state.extra))
    out, unmet = within(state.buffer.rounds, spans), within(state.first_met, spans)
    if torch.equal(spans, state.undone) and not bool(out.any()):
        return state
    buffer = state.buffer.take((~out).nonzero().flatten()) if bool(out.any()) else state.buffer
    return replace(state, seen=state.seen & ~unmet, buffer=buffer, extra={**state.extra, UNDONE: spans})


def unnamed(state: ClientState, names: Sequence[str]) -> list[str]:
    """Names of the classes that a client remembers and that the run does not have."""
    return [name for name in state.waiting_names if name not in names]


def _remembered(earlier: ClientState, empty: ClientState, *, config: Config, client: int) -> ClientState:
    """The state before a run's first round that has the memory of an earlier run, or nothing, with a warning."""
    found, wanted = _kind(earlier), _kind(empty)
    names = earlier.names
    if not names and len(earlier.seen) == len(empty.seen):
        names = empty.names  # of an earlier version, which stored none
    if found != wanted or (not names and bool(earlier.seen.any())):
        reason = f"it holds {found}, and this run learns from {wanted}"
        if found == wanted:
            reason = f"it has {len(earlier.seen)} classes without names, and this run has {len(empty.seen)}"
        logger.warning("client %d starts without the memory of run %s: %s", client, printable(earlier.run), reason)
        return empty
    names = [*names, *itertools.repeat("", len(earlier.seen) - len(names))]  # labels that no class has yet
    met = [name for label, name in enumerate(names) if name and bool(earlier.seen[label])]
    held = list(dict.fromkeys([*met, *earlier.waiting_names]))
    places = {name: place for place, name in enumerate(held)}
    waiting = _renamed(earlier.buffer, names, places)
    if len(earlier.waiting):
        waiting = waiting.followed_by(_renamed(earlier.waiting, earlier.waiting_names, places))
    state = joined(replace(empty, waiting=waiting, waiting_names=held), empty.names, config, client)
    logger.info(
        "client %d begins with the memory of run %s: %d samples, %d classes met",
        client,
        printable(earlier.run),
        len(waiting),
        len(held),
    )
    if missing := unnamed(state, empty.names):
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        count = sum(held[int(label)] in missing for label in waiting.labels)
        logger.warning(
            "client %d: this run does not have %d classes of its memory, %s; their %d samples wait for a run that does",
            client,
            len(missing),
            shown,
            count,
        )
    return state


def _renamed(samples: Samples, names: Sequence[str], labels: Mapping[str, int]) -> Samples:
    """The samples whose classes have labels, with these; ``names`` are those of their present labels."""
    known = torch.tensor([labels.get(name, -1) for name in names], dtype=torch.int64)
    kept = samples.take((known[samples.labels] >= 0).nonzero().squeeze(1))
    return Samples(kept.content, known[kept.labels], torch.zeros_like(kept.labels))


def _kind(state: ClientState) -> str:
    """What the samples of a state are, in words."""
    content = state.buffer.content
    if state.buffer.by_id:
        return f"ids into the data set {state.dataset[:12] or 'of no known digest'}"
    if content.dtype == torch.float32:
        return f"arrays of the shape {tuple(content.shape[1:])}"
    return f"images of {content.shape[2]} x {content.shape[3]} pixels"
