"""What a client remembers of samples that wait for a label: how it has predicted each when it came.

It is kept in ``ClientState.extra``, so that it is always as old as the rest of the state:

- ``late.keys`` (n, k), ``late.answers`` (n,) and ``late.rounds`` (n,): which samples, the predicted labels, and when;
- ``late.since`` (C,): the first round in which each class was among the possible answers; 0 if it never was;
- ``late.dropped`` (): how many samples were dropped in this run; ``late.gone`` (m, k): the keys of the last of them.

All are int64.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_PREFIX = "late."
_KEYS, _ANSWERS, _ROUNDS = "late.keys", "late.answers", "late.rounds"
_SINCE = "late.since"
_DROPPED, _GONE = "late.dropped", "late.gone"

Extra = Mapping[str, Tensor]


def recalled(extra: Extra, keys: Tensor, labels: Tensor) -> Tensor:
    """The label predicted for each sample when it came, int64 (n,); -1 if it was not predicted, or its class not met."""
    found = torch.full_like(labels, -1)
    if _KEYS in extra:
        places = {tuple(key): place for place, key in enumerate(extra[_KEYS].tolist())}
        for row, (key, label) in enumerate(zip(keys.tolist(), labels.tolist(), strict=True)):
            place, since = places.get(tuple(key)), int(extra[_SINCE][label])
            if place is not None and 0 < since <= int(extra[_ROUNDS][place]):
                found[row] = extra[_ANSWERS][place]
    return found


def forgotten(extra: Extra, keys: Tensor) -> dict[str, Tensor]:
    """What is left once samples are learned."""
    return _taken(extra, ~_among(extra[_KEYS], keys)) if _KEYS in extra else dict(extra)


def unpredicted(extra: Extra, waiting: Tensor) -> Tensor:
    """Those of the keys whose samples have no prediction."""
    return waiting[~_among(waiting, extra[_KEYS])] if _KEYS in extra else waiting


def predicted(extra: Extra, keys: Tensor, answers: Tensor, seen: Tensor, number: int) -> dict[str, Tensor]:
    """With predictions of a round; ``seen``, bool (C,), are the possible answers."""
    rounds, since = torch.full_like(answers, number), extra.get(_SINCE, torch.zeros(len(seen), dtype=torch.int64))
    columns = {_KEYS: keys, _ANSWERS: answers, _ROUNDS: rounds}
    joined = {name: torch.cat([extra[name], column]) if name in extra else column for name, column in columns.items()}
    return {**extra, **joined, _SINCE: torch.where(seen & (since == 0), number, since)}


def pruned(extra: Extra, waiting: Tensor, kept: int) -> dict[str, Tensor]:
    """With the predictions of samples that wait, and with the last ``kept`` of others."""
    if _KEYS not in extra:
        return dict(extra)
    stays = _among(extra[_KEYS], waiting)
    others = (~stays).nonzero().flatten()
    stays[others[len(others) - min(kept, len(others)) :]] = True
    return dict(extra) if bool(stays.all()) else _taken(extra, stays)


def dropped(extra: Extra, keys: Tensor) -> dict[str, Tensor]:
    """With samples counted that are about to be dropped; one that was counted before a crash is not counted again."""
    fresh = ~_among(keys, extra[_GONE]) if _GONE in extra else torch.ones(len(keys), dtype=torch.bool)
    count = drops(extra) + int(fresh.sum())
    return forgotten({**extra, _DROPPED: torch.tensor(count), _GONE: keys}, keys)


def drops(extra: Extra) -> int:
    """How many samples were dropped in this run."""
    return int(extra[_DROPPED]) if _DROPPED in extra else 0


def carried(extra: Extra, later: Extra) -> dict[str, Tensor]:
    """With what is remembered here as it is later, whatever else goes back: learned and dropped samples stay so."""
    return {
        **{name: tensor for name, tensor in extra.items() if not name.startswith(_PREFIX)},
        **{name: tensor for name, tensor in later.items() if name.startswith(_PREFIX)},
    }


def _taken(extra: Extra, rows: Tensor) -> dict[str, Tensor]:
    return {name: tensor[rows] if name in (_KEYS, _ANSWERS, _ROUNDS) else tensor for name, tensor in extra.items()}


def _among(keys: Tensor, others: Tensor) -> Tensor:
    """Which keys are among others, bool (n,)."""
    known = {tuple(key) for key in others.tolist()}
    return torch.tensor([tuple(key) in known for key in keys.tolist()], dtype=torch.bool)
