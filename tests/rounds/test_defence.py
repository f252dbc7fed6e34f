"""The defence against hostile clients, worked by hand."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import Reply, Weights
from fedkace_flwr.rounds.defence import AGAINST, Defence
from fedkace_flwr.rounds.server_round import RoundReport

Model = dict[str, np.ndarray]
TRAINED = frozenset({"w.weight", "output.weight", "output.bias"})
MEANS, VARIANCES = "n.running_mean", "n.running_var"
# Two steps of 0.01, the second with half the rate: a weight moves by 0.0158 if they are at right angles.
STEPS = {"epochs": 2, "batch-size": 32, "capacity": 20, "learning-rate": 0.01}
WALK = float(np.hypot(0.01, 0.005)) * np.sqrt(3)  # with 50 samples and a buffer of 20, three batches an epoch


def defence(parameters: frozenset[str] = TRAINED, /, **changes: Any) -> Defence:
    return Defence(Config.parse({"clients": 5, "defence": "on", **STEPS, **changes}), parameters)


def model(seed: int = 0) -> Model:
    draws = np.random.default_rng(seed)
    return {
        "w.weight": draws.normal(size=(100, 40)).astype(np.float32),
        "output.weight": draws.normal(size=(10, 4)).astype(np.float32),
        "output.bias": draws.normal(size=10).astype(np.float32),
        MEANS: draws.normal(size=400).astype(np.float32),
        VARIANCES: draws.uniform(1, 2, 400).astype(np.float32),
        "n.num_batches_tracked": np.array(5),
    }


def trained(origin: Model, seed: int, common: float = 0.3, scale: float = 1.0) -> Model:
    """A model that moved partly in a direction that all share."""
    shared, own = np.random.default_rng(99), np.random.default_rng(1000 + seed)

    def step(array: np.ndarray) -> np.ndarray:
        moved = common * shared.normal(size=array.shape) + own.normal(size=array.shape)
        return (array + WALK * scale * moved).astype(array.dtype)

    learned = {name: step(array) if array.dtype.kind == "f" else array + 3 for name, array in origin.items()}
    return learned | {VARIANCES: np.abs(learned[VARIANCES])}


def mirrored(origin: Model, learned: Model, *names: str) -> Model:
    return {**learned, **{name: 2 * origin[name] - learned[name] for name in names}}


def compared(
    subject: Defence, origin: Model, models: Mapping[int, Weights], examples: int = 50
) -> tuple[dict[int, Weights], dict[int, str], RoundReport]:
    """The models that count, the kinds of the others' rejections, and the report."""
    report = RoundReport(1, ())
    replies = [Reply(client, weights, examples, {}) for client, weights in sorted(models.items())]
    counted, rejects = subject(replies, dict.fromkeys(models, wire.array_record(origin)), report)
    return {reply.client: reply.weights for reply in counted}, {c: kind for c, (_, kind) in rejects.items()}, report


def test_off_nothing_is_compared() -> None:
    origin = model()
    held = {client: trained(origin, client) for client in range(4)} | {4: trained(origin, 4, scale=99)}
    counted, rejects, report = compared(defence(defence="off"), origin, held)
    assert rejects == {} and report.updates == {}
    assert all(counted[client][name] is held[client][name] for client in held for name in origin)


def test_honest_models_pass_untouched() -> None:
    origin = model()
    held = {client: trained(origin, client) for client in range(5)}
    counted, rejects, report = compared(defence(), origin, held)
    assert rejects == {}
    assert all(counted[k][name] is held[k][name] for k in held for name in origin)
    assert all(0.05 < report.updates[k]["update_cosine"] < 0.9 for k in held)
    assert report.record(6)["update_length"][5] is None


@pytest.mark.parametrize("others", [2, 4])
def test_who_learns_among_clients_that_do_not_is_honest(others: int) -> None:
    """A chunk of one class has no loss: its update is weight decay alone, and the median of all is almost nothing."""
    origin = model()
    held = {
        k: {name: (array * (1 - 1e-5)).astype(array.dtype) for name, array in origin.items()} for k in range(others)
    }
    held[others] = trained(origin, others, scale=1.8)
    counted, rejects, report = compared(defence(), origin, held)
    assert rejects == {} and all("clipped_layers" not in each for each in report.updates.values())
    assert all(counted[others][name] is held[others][name] for name in origin)


def test_a_layer_is_clipped_at_three_times_the_median_or_three_times_what_adamw_can_do() -> None:
    origin = {"w.weight": np.zeros((1, 2)), VARIANCES: np.array([4.0])}
    walk = WALK * np.sqrt(2)
    for usual, allowed in ((2 * walk, 6 * walk), (walk / 9, 3 * walk)):
        held = {k: {**origin, "w.weight": np.array([[usual, 0.0]])} for k in range(3)}
        held[3] = {**origin, "w.weight": np.array([[0.0, 8 * walk]])}
        counted, rejects, report = compared(defence(frozenset({"w.weight"})), origin, held)
        assert rejects == {} and report.updates[3]["clipped_layers"] == 1
        assert counted[3]["w.weight"].tolist() == [[0.0, pytest.approx(allowed)]]
        assert all(counted[k] == held[k] for k in range(3))


def test_of_two_models_adamw_alone_tells_the_odd_one() -> None:
    origin = model()
    held = {0: trained(origin, 0), 1: trained(origin, 1, scale=5)}
    _, rejects, report = compared(defence(), origin, held)
    assert rejects == {} and "clipped_layers" not in report.updates[0] and report.updates[1]["clipped_layers"] >= 2


def test_noise_that_protects_a_client_is_no_distance() -> None:
    origin = model()
    held = {client: trained(origin, client, common=0.0, scale=0.1 / WALK) for client in range(2)}
    assert compared(defence(), origin, held)[2].updates[0]["clipped_layers"] >= 2
    private = defence(dp="local", **{"dp-clip": 0.1, "dp-noise": 1.0})
    assert "clipped_layers" not in compared(private, origin, held)[2].updates[0]


def test_statistics_far_from_the_others_give_way_to_their_middle() -> None:
    """Of the model sent 4, so that all moved by about 3; 7 is more than two deviations from the middle, 1.15."""
    deviations = [1.0, 1.1, 1.2, 7.0]
    origin = {"w.weight": np.ones((2, 2)), VARIANCES: np.array([16.0])}
    held = {k: {**origin, VARIANCES: np.array([each**2])} for k, each in enumerate(deviations)}
    counted, rejects, report = compared(defence(frozenset({"w.weight"})), origin, held)
    assert rejects == {} and report.updates[3]["clipped_layers"] == 1
    assert [counted[k][VARIANCES].item() for k in range(4)] == pytest.approx([1.0, 1.21, 1.44, 1.15**2])


FORGED: dict[str, tuple[Callable[[Model, Model], Model], str]] = {
    "the whole model far away": (lambda old, new: {**new, "w.weight": old["w.weight"] + 40 * WALK}, "norm"),
    "one layer far away": (lambda old, new: {**new, "output.weight": 20 * new["output.weight"]}, "norm"),
    "means far away": (lambda old, new: {**new, MEANS: new[MEANS] + 50}, "norm"),
    "the largest floats": (lambda old, new: {**new, "w.weight": np.full_like(old["w.weight"], 3e38)}, "norm"),
    "a layer replaced": (lambda old, new: {**new, "w.weight": new["w.weight"][::-1] / 20}, "retention"),
    "sign flipped": (lambda old, new: mirrored(old, new, *TRAINED), "direction"),
    "means flipped": (lambda old, new: mirrored(old, new, MEANS), "direction"),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("place", [0, 4])
def test_a_forged_model_is_rejected_and_no_other(name: str, place: int) -> None:
    forge, kind = FORGED[name]
    origin = model()
    origin["w.weight"] *= 0.2 if kind == "retention" else 1.0
    held = {client: trained(origin, client, common=1.0) for client in range(5)}
    held[place] = forge(origin, held[place])
    counted, rejects, _ = compared(defence(), origin, held)
    assert rejects == {place: kind} and list(counted) == [client for client in range(5) if client != place]


def test_models_of_different_starts_are_not_compared_by_direction() -> None:
    starts = {client: model(client) for client in range(4)}
    held = {client: trained(starts[client], client, common=1.0) for client in range(4)}
    held[3] = mirrored(starts[3], held[3], *TRAINED)
    sent: dict[int, ArrayRecord] = {client: wire.array_record(start) for client, start in starts.items()}
    _, rejects = defence()([Reply(k, held[k], 50, {}) for k in held], sent, RoundReport(1, ()))
    assert rejects == {}


# Directions


def opposing(count: int, opposed: int, common: float = 0.3) -> np.ndarray:
    """Gram matrix of updates with something in common, the last ones of the opposite sign."""
    draws = np.random.default_rng(3)
    shared = draws.normal(size=2000)
    rows = np.stack([common * shared + draws.normal(size=2000) for _ in range(count)])
    rows[count - opposed :] *= -1
    return np.asarray(rows @ rows.T)


def gram_of(cosines: np.ndarray) -> np.ndarray:
    """Gram matrix of four vectors of length one with these cosines between them, the upper triangle row by row."""
    gram = np.eye(4)
    gram[np.triu_indices(4, 1)] = cosines
    return np.asarray(gram + np.triu(gram, 1).T)


def round_of(subject: Defence, gram: np.ndarray) -> set[int]:
    """Who is rejected in a round, which is then remembered."""
    rejected = subject.opposed("update", range(len(gram)), gram)
    subject.remember()
    return set(rejected)


@pytest.mark.parametrize(("count", "hostile"), [(4, 1), (5, 2), (10, 1), (10, 4)])
def test_opposed_updates_are_rejected_and_no_others(count: int, hostile: int) -> None:
    subject = defence()
    assert [round_of(subject, opposing(count, hostile)) for _ in range(3)][-1] == set(range(count - hostile, count))


def test_more_than_half_are_always_kept() -> None:
    assert len(round_of(defence(), opposing(10, 5))) <= 4
    assert all(round_of(defence(), opposing(few, 1)) == set() for few in (2, 3))


def test_updates_that_all_point_slightly_against_each_other_are_accepted() -> None:
    """Each client's classes exclude the others', as under a fixed simplex: no client is odder than the next."""
    subject = defence()
    assert all(round_of(subject, gram_of(np.full(6, -0.03))) == set() for _ in range(20))


def test_nobody_is_judged_by_a_first_round_alone_and_a_habit_is_noticed() -> None:
    odd = np.full(6, 0.02)
    odd[[2, 4, 5]] = -0.035  # the last client's cosine to the mean of the others is -0.06
    subject = defence()
    rounds = [round_of(subject, gram_of(odd)) for _ in range(8)]
    assert rounds[0] == set() and rounds[-1] == {3}
    assert round_of(subject, opposing(4, 0)) == set()  # whoever behaves counts again at once
    again = defence()
    again.restore(subject.state())  # as after a resume
    assert again.state() == subject.state() and round_of(again, gram_of(odd)) == round_of(subject, gram_of(odd))


def test_a_longer_update_against_the_others_is_noticed_sooner() -> None:
    odd = np.full(6, 0.02)
    odd[[2, 4, 5]] = -0.035
    for count, rejected in ((1.0, {}), (3.0, {3})):
        assert set(defence().opposed("update", range(4), gram_of(odd), [1, 1, 1, count])) == set(rejected)


def test_attempts_at_the_same_round_count_once() -> None:
    subject, once, origin = defence(), defence(), model()
    held = {client: trained(origin, client) for client in range(5)}
    for _ in range(3):
        compared(subject, origin, held)
    compared(once, origin, held)
    for each in (subject, once):
        each.remember()
    assert subject.state() == once.state() and set(once.state()) == set(AGAINST)


def test_a_defence_does_not_depend_on_the_order_of_clients() -> None:
    origin = model()
    held = {client: trained(origin, client, common=1.0) for client in range(5)}
    held[0] = mirrored(origin, held[0], *TRAINED)
    replies = [Reply(client, held[4 - client], 50, {}) for client in range(5)]
    _, rejects = defence()(replies, dict.fromkeys(range(5), wire.array_record(origin)), RoundReport(1, ()))
    assert set(rejects) == {4}
