"""The samples on which a client tests candidates: which come, which stay, which judge."""

import torch

from fedkace_flwr.clients.base import ClientRound
from fedkace_flwr.clients.judges import judges, renewed
from fedkace_flwr.samples import Form, Samples
from fedkace_flwr.storage.client_state import UNDONE, ClientState

CAPACITY = 20


def of(ids: list[int], label: int, number: int) -> Samples:
    return Samples.arrived(torch.tensor(ids), torch.full((len(ids),), label), number)


def after(number: int, chunk: Samples, buffer: Samples, state: ClientState) -> ClientState:
    current = chunk.class_counts(3) > 0
    now = ClientRound(number, chunk, state, current)
    stored = renewed(now, buffer, CAPACITY, torch.Generator().manual_seed(number))
    extra = {**state.extra, **stored}
    return ClientState(state.seen | current, buffer, round=number, follows=state.round, extra=extra)


def new() -> ClientState:
    return ClientState(torch.zeros(3, dtype=torch.bool), Samples.none())


def test_what_is_replayed_does_not_judge_and_what_the_buffer_leaves_does() -> None:
    chunk = of([*range(8)], 0, 1)
    state = after(1, chunk, chunk.take(torch.tensor([0, 1, 2])), new())
    state = after(2, of([100], 0, 2), state.buffer, state)
    assert judges(state).content.tolist() == [3, 4, 5, 6, 7], "not that of the last round either"
    later = ClientState(state.seen, chunk.take(torch.tensor([3, 4])), round=2, extra=state.extra)
    assert judges(later).content.tolist() == [5, 6, 7], "the method has chosen its buffer since"


def test_classes_without_any_are_judged_on_by_the_buffer() -> None:
    first = after(1, of([*range(8)], 0, 1), of([0, 1], 0, 1), new())
    assert judges(first).content.tolist() == [0, 1]
    buffer = of([0], 0, 1).followed_by(of([50, 51], 1, 2))
    second = after(2, of([50, 51, 52], 1, 2), buffer, first)
    assert judges(second).content.tolist() == [2, 3, 4, 5, 6, 7, 50, 51]
    assert not len(judges(new()))


def test_places_are_shared_by_class_and_one_in_ten_is_renewed() -> None:
    state = after(1, of([*range(50)], 0, 1), Samples.none(), new())
    state = after(2, of([*range(100, 150)], 1, 2), Samples.none(), state)
    state = after(3, of([*range(200, 250)], 1, 3), Samples.none(), state)
    state = after(4, of([250], 1, 4), of([250], 1, 4), state)
    found = judges(state)
    counts = {(label, number): 0 for label in (0, 1) for number in (1, 2, 3)}
    for label, number in zip(found.labels.tolist(), found.rounds.tolist(), strict=True):
        counts[label, number] += 1
    assert counts == {(0, 1): 10, (1, 2): 9, (1, 3): 1, (0, 2): 0, (0, 3): 0, (1, 1): 0}


def test_samples_of_undone_rounds_do_not_judge() -> None:
    state = after(1, of([1, 2], 0, 1), Samples.none(), new())
    state = after(2, of([3, 4], 0, 2), Samples.none(), state)
    state = after(3, of([5, 6], 0, 3), Samples.none(), state)
    told = {**state.extra, UNDONE: torch.tensor([[2, 2]])}
    assert judges(ClientState(state.seen, Samples.none(), round=3, extra=told)).content.tolist() == [1, 2]


def test_samples_of_undone_rounds_leave_their_places() -> None:
    state = after(1, of([*range(50)], 0, 1), Samples.none(), new())
    undone = ClientState(state.seen, Samples.none(), round=1, extra={**state.extra, UNDONE: torch.tensor([[1, 1]])})
    state = after(3, of([100], 0, 3), Samples.none(), after(2, of([*range(60, 80)], 0, 2), Samples.none(), undone))
    assert judges(state).rounds.tolist() == [2] * (CAPACITY - 1)


def test_samples_held_by_pixel_are_told_apart() -> None:
    pixels = torch.arange(3 * 3 * 2 * 2, dtype=torch.uint8).reshape(3, 3, 2, 2)
    chunk = Samples.arrived(pixels, torch.tensor([0, 0, 0]), 1)
    empty = Samples.none(Form.picture(2))
    state = after(1, chunk, chunk.take(torch.tensor([1])), ClientState(new().seen, empty))
    state = ClientState(state.seen, state.buffer, round=2, extra=state.extra)
    assert torch.equal(judges(state).content, pixels[[0, 2]])
