"""Models compared across clients: clipping, directions, copies of earlier models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.config import Config
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import Reply
from fedkace_flwr.messaging.validation import Limits, Yardstick
from fedkace_flwr.privacy.central import CentralNoise
from fedkace_flwr.rounds.robustness.clipping import Clipping, set_to_middle
from fedkace_flwr.rounds.robustness.comparison import Comparison
from fedkace_flwr.rounds.robustness.earlier_models import EarlierModels
from fedkace_flwr.rounds.robustness.retention import Retention, retentions, undoing
from fedkace_flwr.rounds.round_report import RoundReport
from fedkace_flwr.rounds.vetting import Vetting

Model = dict[str, np.ndarray]
TRAINED = frozenset({"w", "output.weight", "output.bias"})


def model(seed: int = 0, size: int = 4000) -> Model:
    draws = np.random.default_rng(seed)
    return {
        "w": draws.normal(size=size).astype(np.float32),
        "output.weight": draws.normal(size=(10, 4)).astype(np.float32),
        "output.bias": draws.normal(size=10).astype(np.float32),
        "n.running_mean": draws.normal(size=2000).astype(np.float32),
        "n.running_var": draws.uniform(1, 2, 50).astype(np.float32),
        "n.num_batches_tracked": np.array(5),
    }


def trained(origin: Model, seed: int, common: float = 0.3, scale: float = 1.0) -> Model:
    """A model that moved partly in a direction that all share."""
    shared, own = np.random.default_rng(99), np.random.default_rng(1000 + seed)

    def step(array: np.ndarray) -> np.ndarray:
        moved = common * shared.normal(size=array.shape) + own.normal(size=array.shape)
        return (array + 0.01 * scale * moved).astype(array.dtype)

    learned = {name: step(array) if array.dtype.kind == "f" else array + 3 for name, array in origin.items()}
    return learned | {"n.running_var": np.abs(learned["n.running_var"])}


def replies(models: dict[int, Model], examples: int = 50) -> list[Reply]:
    return [Reply(client, weights, examples, {}) for client, weights in sorted(models.items())]


def comparison(**changes: Any) -> Comparison:
    config = Config.parse({"clients": 5, **{name.replace("_", "-"): value for name, value in changes.items()}})
    noise = CentralNoise(config.privacy, 0, TRAINED)
    limits = Limits.of(config, keys.shapes_of(model()))
    return Comparison(config, Vetting(limits, TRAINED, config.aggregation.norm_bound), TRAINED, noise)


def compared(
    subject: Comparison, origin: Model, models: dict[int, Model], number: int = 1
) -> tuple[dict[int, Model], dict[int, str], RoundReport]:
    """The models that count, the kinds of the others' rejections, and the report."""
    record = keys.array_record(origin)
    report = RoundReport(number, ())
    counted, rejects = subject(replies(models), dict.fromkeys(models, record), report)
    return (
        {reply.client: dict(reply.weights) for reply in counted},
        {c: kind for c, (_, kind) in rejects.items()},
        report,
    )


# Clipping


def test_clipping_worked_by_hand() -> None:
    origin = {"a.weight": np.zeros(1), "a.bias": np.zeros(1), "b.running_var": np.array([4.0]), "b.n": np.array(1)}
    steps = {0: (3.0, 4.0), 1: (0.0, 5.0), 2: (30.0, 40.0)}  # lengths 5, 5, 50
    variances = {0: 9.0, 1: 9.0, 2: 64.0}  # deviations move by 1, 1, 6
    held = {
        client: {
            "a.weight": np.array([weight]),
            "a.bias": np.array([bias]),
            "b.running_var": np.array([variances[client]]),
            "b.n": np.array(7),
        }
        for client, (weight, bias) in steps.items()
    }
    clipped, counts = Clipping(2.0)(replies(held), dict.fromkeys(held, origin))
    assert counts == {2: 2}
    layer = clipped[2].weights["a.weight"], clipped[2].weights["a.bias"]
    assert np.concatenate(layer) == pytest.approx([6.0, 8.0])  # length 10, in the same direction
    assert clipped[2].weights["b.running_var"] == pytest.approx([16.0])  # deviation 2 + 2
    assert clipped[2].weights["b.n"] == 7
    for client in (0, 1):
        assert all(clipped[client].weights[name] is array for name, array in held[client].items())


@pytest.mark.parametrize("claimed", [10, 30, 10_000])
def test_a_number_of_samples_buys_no_influence(claimed: int) -> None:
    """It is what the client says; a device's inbox allows it to say ten thousand."""
    origin = {"w": np.zeros(1)}
    held = [Reply(k, {"w": np.array([1.0])}, 10, {}) for k in (0, 1)] + [Reply(2, {"w": np.array([6.0])}, claimed, {})]
    clipped, counts = Clipping(2.0)(held, dict.fromkeys(range(3), origin))
    assert counts == {2: 1} and clipped[2].weights["w"] == 2.0


def test_with_more_samples_a_model_may_be_farther_before_it_is_rejected_but_not_as_far_as_one_says() -> None:
    usual = Yardstick.of([1.0, 1.0, 3.0], [10, 10, 30])
    assert usual == Yardstick(1.0, 0.1)
    assert [usual.bound(count, 10.0) for count in (5, 10, 30, 40, 10_000)] == [10.0, 10.0, 30.0, 40.0, 40.0]


def test_statistics_far_from_the_others_give_way_to_their_middle() -> None:
    """Standard deviations 2, 3, 4 and 9: the middle is 3.5, the median distance 1 (of 1.5, 0.5, 0.5 and 5.5)."""
    deviations = [2.0, 3.0, 4.0, 9.0]
    held = replies({k: {"n.running_var": np.array([each**2])} for k, each in enumerate(deviations)})
    settled, counts = set_to_middle(held, 3.0)
    assert counts == {3: 1}
    assert [float(reply.weights["n.running_var"][0]) for reply in settled] == [4.0, 9.0, 16.0, 3.5**2]
    for bound, group in ((6.0, held), (0.0, held), (3.0, held[:2])):  # near enough, switched off, no middle of two
        assert set_to_middle(group, bound) == (group, {})


def test_no_weight_is_set_to_the_middle() -> None:
    held = replies({k: {"w": np.array([value])} for k, value in enumerate([1.0, 1.0, 1.0, 99.0])})
    assert set_to_middle(held, 1.0) == (held, {})


def test_an_array_that_others_did_not_move_is_set_back() -> None:
    origin = {"w": np.ones(3)}
    held = {0: {"w": np.ones(3)}, 1: {"w": np.ones(3)}, 2: {"w": np.full(3, 9.0)}}
    clipped, _ = Clipping(3.0)(replies(held), dict.fromkeys(held, origin))
    assert clipped[2].weights["w"].tolist() == [1.0, 1.0, 1.0]


def test_two_replies_are_clipped_by_what_was_usual_before() -> None:
    clipping, origin = Clipping(2.0), {"w": np.zeros(1)}
    pair = {0: {"w": np.array([1.0])}, 1: {"w": np.array([9.0])}}
    assert clipping(replies(pair), dict.fromkeys(pair, origin))[1] == {}  # nothing is known yet
    three = {client: {"w": np.array([1.0])} for client in range(3)}
    clipping(replies(three), dict.fromkeys(three, origin))
    clipped, counts = clipping(replies(pair), dict.fromkeys(pair, origin))
    assert counts == {1: 1} and clipped[1].weights["w"] == pytest.approx(2.0)


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=7), st.floats(1, 5))
def test_after_clipping_no_array_moved_farther_than_the_bound(factors: list[float], bound: float) -> None:
    origin = model(size=100)
    held = {client: trained(origin, client, scale=factor) for client, factor in enumerate(factors)}
    clipped, _ = Clipping(bound)(replies(held), dict.fromkeys(held, origin))
    for names in (["w"], ["output.weight", "output.bias"]):

        def moved(weights: Any, names: list[str] = names) -> float:
            return float(np.linalg.norm(np.concatenate([(weights[n] - origin[n]).ravel() for n in names])))

        before, after = [moved(held[client]) for client in held], [moved(reply.weights) for reply in clipped]
        assert max(after) <= bound * float(np.median(before)) * (1 + 1e-3)


# Retention


def test_retention_worked_by_hand() -> None:
    """W = [[3, 0], [0, 4]]; exchanging its rows keeps nothing, halving it keeps a half."""
    sent = {"output.weight": np.array([[3.0, 0.0], [0.0, 4.0]]), "output.bias": np.array([1.0, 1.0])}
    layers = {
        0: [[3.0, 1.0], [2.0, 4.0]],  # trained: adds at right angles
        1: [[1.5, 0.0], [0.0, 2.0]],
        2: [[0.0, 4.0], [3.0, 0.0]],
        3: [[6.0, 0.0], [0.0, 4.0]],  # (18 + 16) / 25
    }
    models = {client: {**sent, "output.weight": np.array(layer)} for client, layer in layers.items()}
    kept = retentions(replies(models), dict.fromkeys(models, sent), TRAINED)
    found = {client: kept[client]["output.weight"] for client in kept}
    assert [found[client].share for client in layers] == pytest.approx([1.0, 0.5, 0.0, 34 / 25])
    lengths = [5, 25 / 4, 50, 9]  # squared, of the updates
    assert [found[client].chance for client in layers] == pytest.approx([(each / 25 / 4) ** 0.5 for each in lengths])
    assert undoing(kept, 0.5) == {}  # four weights with updates of such lengths tell nothing
    fixed = retentions(replies(models), dict.fromkeys(models, sent), {"output.bias"})
    assert fixed == {client: {} for client in models} and undoing(fixed, 0.5) == {}


def test_who_keeps_less_than_chance_explains_is_rejected() -> None:
    """By hand: the median is 0.9, so that less than 0.5 x 0.9 - 3 x 0.05 = 0.3 is rejected."""
    kept = {
        client: {"w": Retention(share, 0.05), "fixed": Retention(1.0, 0.0)}
        for client, share in enumerate([1.0, 0.29, 0.31, 1.4, 0.9])
    }
    assert undoing(kept, 0.5) == {1: ("w", 0.29)}
    assert undoing(kept, 0.0) == undoing({client: kept[client] for client in (0, 1)}, 0.5) == {}


# Copies of earlier models


def test_a_copy_of_an_earlier_model_is_recognised_also_with_noise() -> None:
    memory, first, second = EarlierModels(TRAINED, 7), model(0), trained(model(0), 1, scale=20)
    memory.remember([memory.sketch(first)], 1)
    sent = memory.sketch(second)
    assert memory.origin_of(memory.sketch(first), sent) == 1
    noisy = {
        **first,
        "w": first["w"] + np.float32(0.01) * np.random.default_rng(5).normal(size=4000).astype(np.float32),
    }
    assert memory.origin_of(memory.sketch(noisy), sent) == 1
    assert memory.origin_of(memory.sketch(trained(second, 8)), sent) is None
    assert memory.origin_of(sent, sent) is None  # nothing was learned, which is no copy of round 1


def test_honest_models_are_never_taken_for_copies() -> None:
    memory, now = EarlierModels(TRAINED, 7), model(0)
    for number in range(1, 30):
        sent = memory.sketch(now)
        learned = [memory.sketch(trained(now, 100 * number + client)) for client in range(4)]
        assert [memory.origin_of(each, sent) for each in learned] == [None] * 4
        memory.remember([sent, *learned], number)
        now = trained(now, number, scale=0.3)


@given(st.integers(1, 300), st.integers(0, 10))
def test_sketches_estimate_distances(size: int, seed: int) -> None:
    """On average over projections the squared distance is exact; each is within a few standard deviations."""
    draws = np.random.default_rng(seed)
    first, second = ({"w": draws.normal(size=size)} for _ in range(2))
    exact = float(np.square(first["w"] - second["w"]).sum())
    estimates = []
    for projection in range(40):
        memory = EarlierModels(frozenset({"w"}), projection)
        estimates.append(float(np.square(memory.sketch(first) - memory.sketch(second)).sum()))
    assert np.mean(estimates) == pytest.approx(exact, rel=0.25)


# Everything together


def test_honest_models_pass_untouched() -> None:
    origin = model()
    held = {client: trained(origin, client) for client in range(5)}
    counted, rejects, report = compared(comparison(), origin, held)
    assert rejects == {} and list(counted) == list(range(5))
    assert all(counted[k][name] is held[k][name] for k in held for name in origin)
    assert all(0.05 < report.updates[k]["update_cosine"] < 0.9 for k in held)
    assert all("clipped_layers" not in report.updates[k] for k in held)
    lengths = report.compared(6)["update_length"]
    assert lengths[0] == pytest.approx(float(np.linalg.norm(held[0]["w"] - origin["w"])), rel=0.02)
    assert lengths[5] is None


FORGED: dict[str, tuple[Callable[[Model, Model], Model], str]] = {
    "the whole model far away": (lambda old, new: {**new, "w": old["w"] + 100 * (new["w"] - old["w"])}, "norm"),
    "one layer far away": (lambda old, new: {**new, "output.weight": 20 * new["output.weight"]}, "norm"),
    "means far away": (lambda old, new: {**new, "n.running_mean": new["n.running_mean"] + 50}, "norm"),
    "a negative variance": (lambda old, new: {**new, "n.running_var": -new["n.running_var"]}, "values"),
    "sign flipped": (lambda old, new: {**new, **{n: 2 * old[n] - new[n] for n in TRAINED}}, "direction"),
    "means flipped": (
        lambda old, new: {**new, "n.running_mean": 2 * old["n.running_mean"] - new["n.running_mean"]},
        "direction",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_model_is_rejected(name: str) -> None:
    forge, kind = FORGED[name]
    origin = model()
    held = {client: trained(origin, client, common=1.0) for client in range(5)}
    held[2] = forge(origin, held[2])
    counted, rejects, _ = compared(comparison(), origin, held)
    assert rejects == {2: kind} and list(counted) == [0, 1, 3, 4]


def test_classes_that_exchange_their_weights_are_noticed_while_the_layer_is_short() -> None:
    origin = model()
    origin["output.weight"] *= 0.05
    held = {client: trained(origin, client, common=1.0) for client in range(5)}
    held[2]["output.weight"] = np.roll(held[2]["output.weight"], 1, axis=0)
    _, rejects, report = compared(comparison(), origin, held)
    assert rejects == {2: "retention"}
    assert report.updates[2]["retention"] < 0.5 < min(report.updates[client]["retention"] for client in (0, 1, 3, 4))
    assert compared(comparison(retention_bound=0.0), origin, held)[1] == {}


def test_a_model_of_an_earlier_round_is_rejected_also_after_a_resume() -> None:
    subject, first = comparison(), model()
    held = {client: trained(first, client) for client in range(5)}
    compared(subject, first, held)
    subject.remember(replies(held), 1)
    second = trained(first, 77, scale=5)
    resumed = comparison()
    resumed.restore(*subject.state())
    for each in (subject, resumed):
        new = {client: trained(second, 50 + client) for client in range(5)}
        for forged in (held[3], held[1], first):  # its own, another client's, the server's
            new[3] = forged
            assert compared(each, second, new, number=2)[1].get(3) == "copy"


def test_what_is_repeated_within_a_round_is_no_copy() -> None:
    """A phase below the quorum is repeated, and clients answer from their store."""
    subject, origin = comparison(), model()
    held = {client: trained(origin, client) for client in range(5)}
    first, second = compared(subject, origin, held), compared(subject, origin, held)
    assert first[1] == second[1] == {}


def test_personal_models_are_not_compared_by_direction() -> None:
    starts = {client: model(client) for client in range(4)}
    held = {client: trained(starts[client], client) for client in range(4)}
    held[3] = {name: 2 * starts[3][name] - array for name, array in held[3].items() if name != "n.running_var"} | {
        "n.running_var": held[3]["n.running_var"],
        "n.num_batches_tracked": held[3]["n.num_batches_tracked"],
    }
    sent: dict[int, ArrayRecord] = {client: keys.array_record(start) for client, start in starts.items()}
    _, rejects = comparison()(replies(held), sent, RoundReport(1, ()))
    assert rejects == {}


def test_bounds_of_zero_and_minus_one_let_everything_through() -> None:
    origin = model()
    held = {client: trained(origin, client, common=1.0) for client in range(5)}
    held[2] = {name: (old - 99 * (held[2][name] - old)).astype(old.dtype) for name, old in origin.items()}
    held[2]["n.running_var"], held[2]["n.num_batches_tracked"] = origin["n.running_var"], np.array(5)
    off = comparison(norm_bound=0.0, clip_bound=0.0, retention_bound=0.0, direction_bound=-1.0, statistics_bound=-1.0)
    counted, rejects, _ = compared(off, origin, held)
    assert rejects == {} and counted[2]["w"] is held[2]["w"]


def test_under_central_noise_an_update_is_clipped_at_dp_clip_whatever_the_others_do() -> None:
    subject, origin = comparison(dp="central", dp_clip=1.0), model()
    held = {client: trained(origin, client) for client in range(5)}
    for others in (1.0, 1e-3):
        changed = {client: trained(origin, client, scale=others) for client in range(5)} | {4: held[4]}
        counted, rejects, _ = compared(subject, origin, changed)
        assert rejects == {}
        moved = np.concatenate([(counted[4][n] - origin[n]).ravel() for n in origin if origin[n].dtype.kind == "f"])
        assert np.linalg.norm(moved) <= 1 + 1e-3
    near = {client: trained(origin, client, scale=1e-3) for client in range(5)}
    counted, _, _ = compared(subject, origin, near)
    assert all(counted[0][name] is near[0][name] for name in origin)


def test_the_same_bound_holds_for_a_client_by_itself() -> None:
    """The checks do not depend on the order of the replies."""
    origin = model()
    held = {client: trained(origin, client, common=1.0) for client in range(5)}
    held[0] = {
        **held[0],
        "w": 2 * origin["w"] - held[0]["w"],
        "output.bias": 2 * origin["output.bias"] - held[0]["output.bias"],
    }
    record = keys.array_record(origin)
    listed = [replace(reply, client=4 - reply.client) for reply in replies(held)][::-1]
    _, rejects = comparison()(listed, dict.fromkeys(range(5), record), RoundReport(1, ()))
    assert set(rejects) == {4}
