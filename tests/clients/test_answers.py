"""The models that a client predicts with: recalibrated, averaged over rounds, and several together."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.common import rounds_of
from support.made.stored import read_state
from support.systems.in_process import Federation
from support.systems.runs import ran

from fedkace_flwr.algorithms.prequential import best_weight, no_evidence, with_chunk
from fedkace_flwr.clients.base import ClientRule
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.messaging import wire
from fedkace_flwr.metrics import accuracy, combined_scores
from fedkace_flwr.samples import Samples
from fedkace_flwr.sources import StreamSource
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.checkpoint import Checkpoints

Make = Callable[..., Config]
SHAPE = {"rounds": 4, "epochs": 2, "capacity": 20, "samples_per_class": 12}


def served(config: Config, client: int) -> float:
    """The accuracy of the model that ``predict`` would load."""
    experiment, folder = Experiment(config), Path(config.run.results_dir) / config.run.run_name
    predictor = load_newest(folder / "clients" / f"client-{client:03d}")
    seen = torch.zeros(10, dtype=torch.bool)
    seen[list(predictor.kept.seen)] = True
    test = experiment.test_set(client, seen)
    return accuracy(predictor.probabilities(experiment.dataset.fetch(test.content)), test.labels, seen)


def test_the_mean_of_probabilities_by_hand() -> None:
    first, second = torch.tensor([[2.0, 0.0, 9.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    mask = torch.tensor([True, True, False])
    e = 2.718281828459045
    own = [e**2 / (e**2 + 1), 1 / (1 + e)]
    scores = combined_scores([first, second], mask)
    assert scores.tolist() == [pytest.approx([sum(own) / 2, 1 - sum(own) / 2, 0])]
    assert combined_scores([first], mask) is first
    scores = combined_scores([first, second], mask, [0.75, 0.25])
    share = 0.75 * own[0] + 0.25 * own[1]
    assert scores.tolist() == [pytest.approx([share, 1 - share, 0])]


@pytest.mark.parametrize("inference", ["fading", "prequential"])  # of which the latter has seen no chunk here
@pytest.mark.parametrize(
    ("views", "locals_"),
    [
        ("none", [1, 3 / 4, 5 / 8, 1 / 2]),
        ("mirrored", [2 / 3, 1 / 2, 5 / 12, 1 / 3]),
    ],
)
def test_the_local_model_begins_with_twice_its_weight(
    small: Make, inference: str, views: str, locals_: list[float]
) -> None:
    federation = Federation(small(method="er", predict_with=inference, test_time_augmentation=views, **SHAPE))
    store = federation.store(0)
    rule = ClientRule(0, federation.experiment, StreamSource(federation.experiment, 0), store)
    for number, expected in zip((1, 2, 3, 8), locals_, strict=True):  # from round 8 on, nothing is left of the excess
        state = replace(store.before(1), round=number, evaluated=number)
        names = rule.predictor.models(state)
        shares = rule.predictor.shares(names, state)
        assert shares["local"] == pytest.approx(expected)
        assert len({round(share, 9) for name, share in shares.items() if name != "local"}) == 1
        assert sum(
            share * (1 + (name in rule.predictor.mirrored(state))) for name, share in shares.items()
        ) == pytest.approx(1)
        assert rule.predictor.shares(names[1:], state) == {}, "without the local model the others have equal weights"


@pytest.mark.parametrize("views", ["none", "mirrored"])
def test_the_local_model_is_weighted_by_what_the_models_say_of_a_chunk_before_it_is_trained_on(
    small: Make, views: str
) -> None:
    changes = {"test-time-augmentation": views, "window": 4, "overlap": 2}
    federation = Federation(small(method="er", predict_with="prequential", **changes, **SHAPE))
    experiment = federation.experiment
    first, other = federation.train(0, 1), federation.train(1, 1)
    federation.weights = dict(other.weights)  # the "global" model
    federation.evaluate(0, 1)
    before = federation.store(0).before(2)
    federation.train(0, 2)
    after = federation.store(0).before(3)

    chunk = experiment.chunk(0, 2)
    known = chunk.take(before.seen[chunk.labels].nonzero().flatten())
    assert 0 < len(known) < len(chunk), "there are images of old and of new classes"

    def probabilities(weights: dict[str, Any], samples: Samples, seen: torch.Tensor, *, flip: bool) -> torch.Tensor:
        net = experiment.network({name: torch.from_numpy(array) for name, array in weights.items()}).eval()
        images = experiment.dataset.fetch(samples.content)
        with torch.no_grad():
            logits: torch.Tensor = net(experiment.preprocess(images.flip(3) if flip else images)).double()
        return logits.masked_fill(~seen, -float("inf")).softmax(dim=1)

    def answers(samples: Samples, seen: torch.Tensor, local: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        flips = (False, True) if views == "mirrored" else (False,)
        received = [probabilities(federation.weights, samples, seen, flip=flip) for flip in flips]
        return probabilities(local, samples, seen, flip=False), torch.stack(received).mean(dim=0)

    local, received = answers(known, before.seen, dict(first.weights))
    places = (torch.arange(len(known)), known.labels)
    latest = torch.isin(known.labels, experiment.chunk(0, 1).labels)
    assert bool(latest.all()), "after a single round all classes met are those of the chunk before"
    expected = with_chunk(no_evidence(), local[places], received[places], latest)
    assert torch.allclose(after.extra["prequential.evidence"], expected, atol=1e-4)

    weight = best_weight(expected, 4 / int(after.seen.sum()), 3 / 4 if views == "none" else 1 / 2)
    test = experiment.test_set(0, after.seen)
    trained = federation.store(0).answer(2)
    assert trained is not None
    local, received = answers(test, after.seen, dict(trained.arrays))
    found = accuracy(weight * local + (1 - weight) * received, test.labels, after.seen)
    assert federation.evaluate(0, 2).metrics[wire.ACCURACY] == pytest.approx(found)


def test_a_client_that_begins_to_test_chunks_in_a_later_round_has_no_evidence_yet(small: Make) -> None:
    """As when a device is updated between two rounds: its state does not say which classes it has learned last."""
    changes = {"method": "er", "overlap": 2, "window": 4, **SHAPE}
    before = Federation(small(predict_with="fading", **changes))
    before.train(0, 1)
    before.evaluate(0, 1)
    updated = Federation(small(predict_with="prequential", **changes))
    found = []
    for number in (2, 3):
        updated.train(0, number)
        updated.evaluate(0, number)
        found.append(float(updated.store(0).before(number + 1).extra["prequential.evidence"][:, -1].sum()))
    assert found[0] == 0 < found[1]


@pytest.mark.slow
def test_what_a_client_predicts_with_leaves_its_training_alone(small: Make) -> None:
    changes = {"method": "er", "recalibrate-batchnorm": True, "classifier": "fading", "overlap": 2, **SHAPE}
    one, other = (ran(small(run_name=name, predict_with=name, **changes)) for name in ("fading", "prequential"))
    assert [line["client_drift"] for line in one] == [line["client_drift"] for line in other]
    for column in ("local_accuracy", "global_accuracy"):
        assert [line[column] for line in one] == [line[column] for line in other]
    assert [line["client_accuracy"] for line in one][1:] != [line["client_accuracy"] for line in other][1:]
    assert one[0]["client_accuracy"] == other[0]["client_accuracy"], "there is no evidence before the second chunk"


@pytest.mark.slow
def test_recalibration_repairs_the_mean_of_the_first_rounds(small: Make) -> None:
    plain = ran(small(method="fedavg", run_name="plain", overlap=0, **SHAPE))
    repaired = ran(small(method="fedavg", run_name="repaired", recalibrate_batchnorm=True, overlap=0, **SHAPE))
    assert plain[0]["client_accuracy"] != repaired[0]["client_accuracy"]
    assert plain[0]["client_drift"] == repaired[0]["client_drift"], "training is the same"
    assert sum(line["accuracy"] for line in repaired[:3]) > sum(line["accuracy"] for line in plain[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inference", "classifier", "views"),
    [
        ("mean", "trained", "none"),
        ("fading", "fading", "mirrored"),
        ("prequential", "discriminant", "none"),
    ],
)
def test_a_client_predicts_by_the_mean_of_its_models_and_predict_answers_alike(
    small: Make, tmp_path: Path, inference: str, classifier: str, views: str
) -> None:
    changes: dict[str, Any] = {
        "predict-with": inference,
        "recalibrate-batchnorm": True,
        "keep_models": "always",
    }
    changes |= {"classifier": classifier, "test-time-augmentation": views}
    config = small(method="er", **changes, **SHAPE | {"rounds": 3})
    last = ran(config)[-1]
    names = ["local", "global"]
    for client in range(config.stream.clients):
        kept = load_newest(tmp_path / "run" / "clients" / f"client-{client:03d}").kept
        assert kept.mirrored == (() if views == "none" else (names[-1],))
        assert list(kept.answers) == names and kept.described()["model"] == " and ".join(names)
        assert served(config, client) == last["client_accuracy"][client]
    assert last["switched_at"] == [None] * 3
    assert all(value is not None for value in last["local_accuracy"] + last["global_accuracy"])


@pytest.mark.slow
def test_a_local_model_is_tested_with_the_output_layer_that_it_predicts_with_and_sent_with_the_trained_one(
    small: Make, tmp_path: Path
) -> None:
    for name in ("trained", "discriminant"):
        changes = {"predict-with": "local", "classifier": name, "keep_models": "always", "run_name": name}
        last = ran(config := small(method="er", **changes, **SHAPE))[-1]
        assert served(config, 0) == last["client_accuracy"][0] == last["local_accuracy"][0]
    one, other = (rounds_of(tmp_path / name) for name in ("trained", "discriminant"))
    assert [line["client_drift"] for line in one] == [line["client_drift"] for line in other]
    assert [line["client_accuracy"] for line in one] != [line["client_accuracy"] for line in other]


def test_a_local_model_that_is_refitted_without_a_chunk_is_tested_again(small: Make, tmp_path: Path) -> None:
    changes = {"predict-with": "local", "classifier": "discriminant", "keep_models": "always", "fraction_train": 0.5}
    lines = ran(config := small(method="er", clients=4, **changes, **SHAPE))
    experiment = Experiment(config)
    idle = [client for client in range(4) if not experiment.trains(client, 4)]
    assert idle
    for client in idle:
        assert served(config, client) == lines[-1]["client_accuracy"][client] == lines[-1]["local_accuracy"][client]


PARTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "recalibrate": {"recalibrate-batchnorm": True},
    "mean": {"predict-with": "mean"},
    "mean, fading": {"predict-with": "fading"},
    "discriminant": {"classifier": "discriminant"},
    "both": {"classifier": "both"},
    "fading": {"classifier": "fading"},
    "views": {"test-time-augmentation": "mirrored", "predict-with": "global"},
    "simplex": {"output_layer": "simplex"},
    "augment": {"augment": "flip-shift"},
    "adjusted": {"logit_adjustment": 1.0},
}


def assert_each_differs(small: Make, method: str, parts: dict[str, dict[str, Any]]) -> None:
    found = {}
    for name, part in parts.items():
        lines = ran(small(method=method, run_name=name, **part, **SHAPE))
        found[name] = json.dumps([line["client_accuracy"] for line in lines])
    assert len(set(found.values())) == len(parts), found


SEVERAL_MODELS = [
    "er",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("fedkace", "refed", "ofcl", "fedcbdr", "dcfcl", "fedavg", "derpp", "flwf")
    ),
]
"""A method of each kind that can predict by several models."""


@pytest.mark.slow
@pytest.mark.parametrize("method", SEVERAL_MODELS)
def test_every_method_tests_its_models_on_each_new_chunk(small: Make, tmp_path: Path, method: str) -> None:
    config = small(method=method, predict_with="prequential", **SHAPE)
    ran(config)
    for client in range(config.stream.clients):
        state = read_state(tmp_path / "run" / "clients" / f"client-{client:03d}" / "state-000004.npz")
        assert state.extra["prequential.evidence"][:, -1].sum() > 12, "images of at least two chunks"


@pytest.mark.slow
@pytest.mark.parametrize("method", SEVERAL_MODELS)
def test_every_part_makes_a_difference_to_every_method_that_it_touches(small: Make, method: str) -> None:
    assert_each_differs(small, method, PARTS)


@pytest.mark.parametrize("method", ["tfcl", "centralized"])
def test_the_parts_of_training_make_a_difference_to_the_methods_without_a_global_model(
    small: Make, method: str
) -> None:
    assert_each_differs(small, method, {"usual": {}, "augment": PARTS["augment"], "adjusted": PARTS["adjusted"]})


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "refed", "recalibrate-batchnorm": True},
        {"method": "fedcbdr", "classifier": "both"},
        {"method": "fedcbdr", "recalibrate-batchnorm": True, "predict-with": "mean"},
    ],
)
def test_a_client_keeps_the_model_that_it_tested_though_its_buffer_changes_with_the_evaluation(
    small: Make, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = small(keep_models="always", **changes, **SHAPE)
    last = ran(config)[-1]
    assert [served(config, client) for client in range(config.stream.clients)] == last["client_accuracy"]


def test_both_models_are_also_tested_with_every_class_as_a_possible_answer(small: Make, tmp_path: Path) -> None:
    config = small(method="fedkace", evaluate="both", **SHAPE)
    last = ran(config)[-1]
    experiment = Experiment(config)
    checkpoint = Checkpoints(tmp_path / "run" / "server").newest()
    assert checkpoint is not None
    for client in range(config.stream.clients):
        folder = tmp_path / "run" / "clients" / f"client-{client:03d}"
        answer = atomic.read(folder / "answer-000004.npz")
        assert answer is not None
        test = experiment.test_set(client, read_state(folder / "state-000004.npz").seen)
        for weights, column in ((answer[0], "local_accuracy"), (checkpoint.weights, "global_accuracy")):
            net = experiment.network({name: torch.from_numpy(array) for name, array in weights.items()}).eval()
            with torch.no_grad():
                logits = net(experiment.preprocess(experiment.dataset.fetch(test.content)))
            right = logits.argmax(dim=1) == test.labels
            assert last[f"{column}_unmasked"][client] == pytest.approx(float(right.double().mean()))
            assert last[f"{column}_unmasked"][client] <= last[column][client]
    assert last["local_accuracy_unmasked"] != last["local_accuracy"]


def test_only_a_run_that_tests_both_models_tests_them_with_every_class(small: Make) -> None:
    last = ran(small(method="fedkace", **SHAPE))[-1]
    assert last["local_accuracy_unmasked"] == last["global_accuracy_unmasked"] == [None] * 3
