"""Tensors that keep their place in memory while the objects that hold them come and go.

A recorded step reads and writes fixed memory. The next training makes new objects, a loss for instance, with tensors of
their own. If both are built alike, the new object takes the old one's tensors over, with its own values in them.
"""

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Parts = dict[str, object]
Seats = dict[str, "Seat"]

_NAMED = types.ModuleType | types.BuiltinFunctionType | type  # hold no tensors
_UNKNOWN = "unknown"  # may hold tensors that cannot be found, as a closure or a partial function


@dataclass(frozen=True)
class Seat:
    """A tensor or a plain value, where it was found.

    Attributes
    ----------
    value : object
        What sits there.
    put : callable, optional
        Puts a tensor there instead; None where that is impossible, as in a tuple.
    """

    value: object
    put: Callable[[Tensor], object] | None


def seats_in(parts: Parts) -> Seats:
    """Everything that can be reached through attributes, mappings and sequences, by its path.

    An object may name in ``unread_by_steps`` the attributes that a step does not read: numbers that change from
    training to training without changing the step. They are left out.
    """
    found: Seats = {}
    visited: dict[int, str] = {}

    def visit(path: str, value: object, put: Callable[[Tensor], object] | None) -> None:
        if isinstance(value, Tensor | bool | int | float | str | torch.dtype | torch.device | None):
            found[path] = Seat(value, put)
        elif isinstance(value, _NAMED) or (isinstance(value, types.FunctionType) and not value.__closure__):
            found[path] = Seat(getattr(value, "__qualname__", repr(value)), None)
        elif isinstance(value, types.MethodType):
            found[path] = Seat(value.__func__.__qualname__, None)
            visit(f"{path}: of", value.__self__, None)
        elif id(value) in visited:
            found[path] = Seat(f"as {visited[id(value)]}", None)
        else:
            visited[id(value)] = path
            known = hasattr(value, "__dict__") or isinstance(value, Mapping | list | tuple)
            known = known and not isinstance(value, types.FunctionType | partial)
            kind = f"{type(value).__module__}.{type(value).__qualname__}" if known else _UNKNOWN
            found[f"{path}: type"] = Seat(kind, None)
            for name, part, place in _inside(value):
                visit(f"{path}.{name}", part, place)

    for name, part in parts.items():
        visit(name, part, partial(parts.__setitem__, name))
    return found


def _inside(value: object) -> Iterator[tuple[str, object, Callable[[Tensor], object] | None]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key), part, partial(value.__setitem__, key) if isinstance(value, dict) else None
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield str(index), part, partial(value.__setitem__, index) if isinstance(value, list) else None
    else:
        attributes = getattr(value, "__dict__", {})
        unread = getattr(value, "unread_by_steps", ())
        for name in sorted(set(attributes).difference(unread)):
            yield name, attributes[name], partial(attributes.__setitem__, name)


def signature(seats: Seats, own: Collection[int]) -> tuple[object, ...] | None:
    """What two sets of seats have in common if their tensors can take each other's places.

    Parameters
    ----------
    seats : dict of str to Seat
        As found by :func:`seats_in`.
    own : collection of int
        The ids of tensors that stay where they are, such as the network's weights.

    Returns
    -------
    tuple or None
        Paths, shapes, dtypes and plain values; None if a tensor cannot be replaced, or may lie where it is not found.
    """
    found: list[object] = []
    first: dict[int, str] = {}
    for path, seat in seats.items():
        value = seat.value
        if value is _UNKNOWN:
            return None
        if not isinstance(value, Tensor):
            found.append((path, type(value), value))
        elif id(value) in own:
            found.append((path, id(value)))
        elif seat.put is None:
            return None
        else:
            same = first.setdefault(id(value), path)
            found.append((path, value.shape, value.dtype, value.device, same))
    return tuple(found)


def own_memory(seats: Seats, own: Collection[int]) -> None:
    """Give tensors that cannot be written to memory of their own: inference tensors and expanded ones."""
    for seat in seats.values():
        value = seat.value
        if isinstance(value, Tensor) and id(value) not in own and seat.put and not is_writable(value):
            seat.put(value.clone())


@torch.no_grad()
def take_over(seats: Seats, kept: Seats, own: Collection[int]) -> bool:
    """Put kept tensors into seats of the same signature, with the values that sit there now.

    A tensor that the kept object has made since, where the new one still has None, is set to zero. Returns False, with
    some seats taken, if a tensor has no seat.
    """
    for path, old in kept.items():
        if not isinstance(old.value, Tensor) or id(old.value) in own:
            continue
        seat = seats.get(path)
        if seat is None or seat.put is None:
            return False
        if isinstance(seat.value, Tensor):
            old.value.copy_(seat.value)
        elif seat.value is None:
            old.value.zero_()
        else:
            return False
        seat.put(old.value)
    return True


@contextmanager
def undone(tensors: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
    """Restore tensors in place to their values from before the block, and set those that appeared in it to zero."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors()]
    try:
        yield
    finally:
        known = {id(tensor) for tensor, _ in before}
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
            for tensor in tensors():
                if id(tensor) not in known:
                    tensor.zero_()


def is_writable(tensor: Tensor) -> bool:
    """Whether a step can change the tensor in place: no inference tensor, and no element stands for several."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not tensor.is_inference() and not is_expanded
