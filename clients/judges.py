"""The samples on which a client tests candidates for the global model: learned once and never replayed.

On what a client replays, a model stays right for long after its labels have become wrong. The samples are kept in
``ClientState.extra``, so that they are always as old as the rest of the state.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkace_flwr.algorithms.class_balance import drawn, water_filling_quotas
from fedkace_flwr.clients.base import ClientRound
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState, within

_COLUMNS = {"content": "judges.content", "labels": "judges.labels", "rounds": "judges.rounds"}
_RENEWED = 10  # one of so many places of a class goes to new samples in a round, so that wrong labels come in slowly


def judges(state: ClientState) -> Samples:
    """The samples that judge; of classes that have none yet, those of the buffer."""
    found = _stored(state)
    if found is None:
        return state.buffer
    # Those of the last round are fresher in the accepted model's memory than in a candidate's; and a method may choose
    # its buffer after its training.
    fit = (found.rounds < state.round) & ~within(found.rounds, state.undone) & ~_among(found, state.buffer)
    found = found.take(fit.nonzero().flatten())
    return found.followed_by(state.buffer.take((~torch.isin(state.buffer.labels, found.labels)).nonzero().flatten()))


def renewed(now: ClientRound, buffer: Samples, capacity: int, generator: torch.Generator) -> Mapping[str, Tensor]:
    """What to store after a training: at most ``capacity`` samples that judge, of each class equally many.

    Parameters
    ----------
    now : ClientRound
        The round; what its new buffer leaves of its chunk takes free places, and one in ten of the others.
    buffer : Samples
        M_t.
    capacity : int
        Places.
    generator : torch.Generator
        CPU generator.
    """
    old = _stored(now.state)
    if old is not None:  # those of undone rounds judge no more
        old = old.take((~within(old.rounds, now.state.undone)).nonzero().flatten())
    fresh = now.chunk.take((~_among(now.chunk, buffer)).nonzero().flatten())
    both = fresh if old is None else old.followed_by(fresh)
    is_fresh = torch.arange(len(both)) >= len(both) - len(fresh)
    members = [(both.labels == label).nonzero().flatten() for label in sorted(set(both.labels.tolist()))]
    kept = [torch.empty(0, dtype=torch.int64)]
    for positions, places in zip(members, water_filling_quotas([len(each) for each in members], capacity), strict=True):
        known, new = positions[~is_fresh[positions]], positions[is_fresh[positions]]
        come = drawn(new, max(places - len(known), -(-places // _RENEWED)), generator)
        kept += [drawn(known, places - len(come), generator), come]
    chosen = both.take(torch.cat(kept).sort().values)
    return {stored: getattr(chosen, name) for name, stored in _COLUMNS.items()}


def _stored(state: ClientState) -> Samples | None:
    if _COLUMNS["content"] not in state.extra:
        return None
    return Samples(**{name: state.extra[stored] for name, stored in _COLUMNS.items()})


def _among(samples: Samples, others: Samples) -> Tensor:
    """Which samples have the content of one of the others, bool (n,)."""
    known = {row.numpy().tobytes() for row in others.content}
    return torch.tensor([row.numpy().tobytes() in known for row in samples.content], dtype=torch.bool)
