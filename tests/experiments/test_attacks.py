"""What hostile clients send, and that a run with one of them ends as it should."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.common import SMALL, rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.attacks import Altered, FlippedLabels, StudyAttack
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.privacy.hostile import attack_of
from fedkace_flwr.registry import METHODS
from fedkace_flwr.samples import Samples

Model = dict[str, np.ndarray]
TRAINED = frozenset({"a.weight", "output.weight", "output.bias"})


def sent() -> Model:
    return {
        "a.weight": np.array([1.0, 2.0, 3.0], dtype=np.float32),
        "output.weight": np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], dtype=np.float32),
        "output.bias": np.zeros(3, dtype=np.float32),
        "n.running_mean": np.array([5.0], dtype=np.float32),
        "n.running_var": np.array([4.0], dtype=np.float32),
        "n.num_batches_tracked": np.array(3),
    }


def learned() -> Model:
    moved = {name: (array + 1).astype(array.dtype) for name, array in sent().items()}
    return moved | {"output.bias": np.array([1.0, 2.0, 3.0], dtype=np.float32)}


def altered(attack: str, scale: float = 1.0, client: int = 3, number: int = 2) -> Model:
    hostile = StudyAttack(Config.parse({"clients": 4, "attack": f"{attack}:{scale}"}))
    start = {name: array - 7 for name, array in sent().items()}
    return Altered(hostile, TRAINED, lambda: start).altered(sent(), learned(), client, number)


def test_the_clients_with_the_highest_numbers_are_hostile() -> None:
    attack = attack_of(Config.parse({"clients": 10, "attack": "noise", "hostile-clients": 2}))
    assert isinstance(attack, StudyAttack)
    assert [client for client in range(10) if attack.is_hostile(client)] == [8, 9]
    assert attack_of(Config()) is None


def test_an_attack_whose_code_is_not_installed_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^attack = 'sign-flop': is not installed here; .* did you mean sign-flip"):
        configured(Config.parse({"attack": "sign-flop"}))


def test_a_flipped_sign_mirrors_parameters_and_means_and_leaves_variances() -> None:
    forged = altered("sign-flip", 3.0)
    assert forged["a.weight"].tolist() == [-2.0, -1.0, 0.0]
    assert forged["n.running_mean"].tolist() == [2.0]
    assert forged["n.running_var"].tolist() == [5.0] and forged["n.num_batches_tracked"] == 4
    assert all(forged[name].dtype == array.dtype for name, array in learned().items())


def test_flipped_means_change_means_alone() -> None:
    forged = altered("flipped-means", 9.0)
    assert forged.pop("n.running_mean").tolist() == [-4.0]
    assert all((forged[name] == learned()[name]).all() for name in forged)


def test_inflated_variances_move_standard_deviations_upwards_alone() -> None:
    """From 2 to the root of 5 in training, three times as far in the attack."""
    forged = altered("inflated-variances", 3.0)
    assert forged.pop("n.running_var").tolist() == pytest.approx([(2 + 3 * (5**0.5 - 2)) ** 2])
    assert all((forged[name] == learned()[name]).all() for name in forged)


def test_an_update_of_flipped_labels_can_be_enlarged() -> None:
    assert altered("label-flip", 3.0)["a.weight"].tolist() == (learned()["a.weight"] + 2).tolist()
    once = altered("label-flip")
    assert all((once[name] == array).all() for name, array in learned().items())


def test_rolled_outputs_give_each_class_the_weights_of_another() -> None:
    forged = altered("rolled-outputs")
    assert forged["output.weight"].tolist() == [[4.0, 4.0], [2.0, 2.0], [3.0, 3.0]]
    assert forged["output.bias"].tolist() == [3.0, 1.0, 2.0]
    assert (forged["a.weight"] == learned()["a.weight"]).all()


def test_replaced_weights_are_the_learned_ones_in_another_order() -> None:
    forged, again = altered("replacement"), altered("replacement", number=5)
    assert sorted(forged["output.weight"].ravel()) == sorted(learned()["output.weight"].ravel())
    assert all((forged[name] == again[name]).all() for name in forged)  # the same model every round


def length(model: Model) -> float:
    return float(np.linalg.norm(np.concatenate([(model[name] - sent()[name]).ravel() for name in sorted(TRAINED)])))


@pytest.mark.parametrize(("attack", "shared"), [("noise", False), ("collusion", True)])
def test_noise_is_as_long_as_the_update_and_colluders_send_the_same(attack: str, shared: bool) -> None:
    first, second = altered(attack, 2.0), altered(attack, 2.0, client=2, number=4)
    assert length(first) == pytest.approx(2 * length(learned()), rel=1e-5)
    assert np.allclose(first["a.weight"], second["a.weight"]) == shared


def test_a_stale_model_is_that_of_the_beginning_from_the_second_round_on() -> None:
    assert altered("stale-model")["a.weight"].tolist() == [-6.0, -5.0, -4.0]
    assert altered("stale-model", number=1)["a.weight"].tolist() == learned()["a.weight"].tolist()


def test_flipped_labels_exchange_the_classes_of_a_chunk_in_a_ring() -> None:
    class True_:
        def chunk(self, number: int, learned: int) -> Samples:
            return Samples.arrived(torch.arange(5), torch.tensor([7, 2, 2, 4, 7]), number)

    flipped = FlippedLabels(True_()).chunk(3, 2)  # type: ignore[arg-type]
    assert flipped.labels.tolist() == [2, 4, 4, 7, 2]
    assert flipped.content.tolist() == [0, 1, 2, 3, 4] and flipped.rounds.tolist() == [3] * 5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attack": "noise", "clients": 3, "hostile-clients": 4}, "hostile-clients = 4: must be at most clients = 3"),
        (
            {"attack": "noise", "dataset": "inbox", "class-names": "a, b", "image-size": 8},
            "attack = 'noise': for simulations alone",
        ),
        ({"aggregation": "median", "secagg": True}, "the server learns only a sum; must be 'mean'"),
        ({"aggregation": "median", "dp": "central"}, "calibrated for a mean; must be 'mean'"),
        ({"aggregation": "trimmed-mean:5", "clients": 10}, "hostile must be less than half of the clients, at most 4"),
        ({"aggregation": "median", "method": "lkc"}, "with method = 'lkc', whose server does not merge models"),
        ({"aggregation": "median", "method": "tfcl"}, "with method = 'tfcl', whose server does not merge models"),
        (
            {"aggregation": "median", "method": "centralized"},
            "whose server does not merge models by this key; must be 'mean'",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        configured(Config.parse(values))


MODELS_ALONE = ("sign-flip", "noise", "collusion", "replacement", "stale-model", "false-count", "flipped-means")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        *[
            (
                {"method": "tfcl", "attack": f"{attack}:9"},
                f"attack = '{attack}:9' with method = 'tfcl', whose clients send no models: must be 'label-flip' or 'none'",
            )
            for attack in MODELS_ALONE
        ],
        (
            {"method": "tfcl", "attack": "label-flip:9"},
            "attack = 'label-flip:9' with method = 'tfcl', whose clients send no models: must be 'label-flip', without a "
            "scale",
        ),
        *[
            (
                {"method": "centralized", "attack": f"{attack}:9"},
                f"attack = '{attack}:9' with method = 'centralized', whose clients send no models: must be 'none'",
            )
            for attack in (*MODELS_ALONE, "label-flip")
        ],
        *[
            (
                {**values, "attack": "rolled-outputs"},
                f"attack = 'rolled-outputs' with output-layer = 'simplex' (method = '{values['method']}'), which never "
                "changes: must be another attack, or output-layer = 'learned'",
            )
            for values in ({"method": "fedframe"}, {"method": "er-balanced", "output-layer": "simplex"})
        ],
        *[
            (
                {"method": "er-balanced", "batchnorm-statistics": "local", "attack": attack},
                f"attack = '{attack}' with batchnorm-statistics = 'local', which are not sent: must be another attack, or "
                "batchnorm-statistics = 'shared'",
            )
            for attack in ("flipped-means", "inflated-variances")
        ],
        *[
            (
                {"attack": "label-flip", "window": 1, "overlap": 0, "stream": stream},
                "attack = 'label-flip' with window = 1, one class in each chunk: must be another attack, or window at "
                "least 2",
            )
            for stream in ("windows", "quantity-skew")
        ],
        (
            {"attack": "false-count"},
            "attack = 'false-count' with a scale of 1, the true count: must have another, as false-count:10",
        ),
    ],
)
def test_an_attack_that_would_do_nothing_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        configured(Config.parse(values))
    assert str(refusal.value) == words


@pytest.mark.matrix
@pytest.mark.parametrize(
    "values",
    [
        {"method": "tfcl", "attack": "label-flip"},
        {"method": "tfcl"},
        {"method": "fedframe", "attack": "sign-flip"},
        {"method": "er-balanced", "attack": "rolled-outputs"},
        {"method": "er-balanced", "batchnorm-statistics": "local", "attack": "sign-flip"},
        {"method": "er-balanced", "attack": "flipped-means"},
        {"method": "er-balanced", "attack": "inflated-variances"},
        {"attack": "label-flip", "window": 1, "overlap": 0, "stream": "blurred"},
        {"attack": "sign-flip", "window": 1, "overlap": 0},
        {"attack": "false-count:10"},
    ],
)
def test_an_attack_that_does_something_is_accepted(values: dict[str, Any]) -> None:
    assert configured(Config.parse(values))[1].attack.attack == values.get("attack", "none")


def test_every_method_whose_clients_send_models_can_be_attacked() -> None:
    spared = set()
    for name in METHODS:
        try:
            configured(Config.parse({"method": name, "attack": "sign-flip"}))
        except ConfigError:
            spared.add(name)
    assert spared == {"tfcl", "afl", "centralized"}


def test_an_attack_on_running_means_needs_a_network_with_some() -> None:
    with pytest.raises(ConfigError, match="attack = 'flipped-means' with network = 'cnn', which has no running means"):
        configured(Config.parse({"network": "cnn", "attack": "flipped-means"}))


def test_a_run_does_not_begin_with_an_attack_that_would_do_nothing(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="attack = 'sign-flip' with method = 'tfcl'"):
        run_inline(small(method="tfcl", attack="sign-flip"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_attack_that_tfcl_accepts_changes_its_run(small: Callable[..., Config], tmp_path: Path) -> None:
    keys = {"method": "tfcl", "rounds": 2}
    run_inline(small(run_name="honest", **keys))
    run_inline(small(run_name="hostile", attack="label-flip", **keys))
    assert rounds_of(tmp_path / "honest") != rounds_of(tmp_path / "hostile")


@pytest.mark.parametrize(
    "hiding", [{"secagg": True}, {"dp": "central"}, {"optimiser": "sgd:0.9"}, {"method": "scaffold"}]
)
def test_a_defence_that_cannot_compare_updates_is_refused(hiding: dict[str, Any]) -> None:
    assert configured(Config.parse({**hiding, "defence": "off"}))
    with pytest.raises(ConfigError, match="defence = 'on' with"):
        configured(Config.parse({**hiding, "defence": "on"}))
    assert Config.parse({"dp": "local", "defence": "on", "aggregation": "median"})


def outcome(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    keyed = {name.replace("_", "-"): value for name, value in changes.items()}
    base = {**SMALL, "defence": "on", "clients": 4, "width": 8, "epochs": 2, "rounds": 4}
    config = Config.parse({**base, "results-dir": str(folder), "run-name": "run", **keyed})
    run_inline(config)
    return rounds_of(folder / "run")


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "scale", "kinds"),
    [
        ("sign-flip", 9.0, {"direction", "norm", "retention"}),
        ("replacement", 3.0, {"direction", "norm", "retention"}),
        ("stale-model", 1.0, {"direction", "retention"}),
        ("false-count", 10.0, {"count"}),
        ("flipped-means", 9.0, {"direction", "norm"}),
        ("rolled-outputs", 1.0, {"norm", "retention"}),
    ],
)
def test_a_hostile_client_is_found_in_a_real_run_and_nobody_else_is(
    tmp_path: Path, attack: str, scale: float, kinds: set[str]
) -> None:
    records = outcome(tmp_path, attack=f"{attack}:{scale}")
    failures = [failure for record in records for failure in record["failures"]]
    assert {failure["client"] for failure in failures} == {3}
    assert {failure["kind"] for failure in failures} <= kinds
    assert len(records[-1]["update_cosine"]) == 4


@pytest.mark.parametrize("attack", ["noise", "label-flip"])
def test_no_server_makes_a_device_hostile(attack: str, small: Callable[..., Config], tmp_path: Path) -> None:
    """A node with a folder of its own is a device; only it refuses, so that the others' quorum decides on the run."""
    config = small(clients=4, attack=attack, hostile_clients=2)
    run_inline(config, node_config=lambda place: {"state-dir": str(tmp_path / "own")} if place == 3 else {})
    failures = [failure for record in rounds_of(tmp_path / "run") for failure in record["failures"]]
    words = f"attack = '{attack}': for simulations alone; on a node with a folder of its own"
    assert {failure["client"] for failure in failures} == {3} and all(words in each["reason"] for each in failures)
    assert not list(tmp_path.glob("own/**/*.npz"))


@pytest.mark.slow
def test_an_honest_run_is_that_without_the_defence(tmp_path: Path) -> None:
    checked = outcome(tmp_path / "checked")
    free = outcome(tmp_path / "free", defence="off")
    for record in checked:
        for name in ("update_length", "update_cosine", "running_means_cosine", "retention"):
            record.pop(name)
    assert checked == free


@pytest.mark.slow
def test_inflated_variances_are_kept_near_in_a_real_run(tmp_path: Path) -> None:
    """By their updates' length alone they passed, and grew from round to round: the others shrink them in training."""
    records = outcome(tmp_path, attack="inflated-variances:10")
    assert all(set(record["clipped_layers"]) and record["clipped_layers"][3] > 0 for record in records[1:])
    assert all(not any(record["clipped_layers"][:3]) for record in records[1:])
    assert records[-1]["failures"] == []


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "multi-krum", "geometric-median"])
@pytest.mark.parametrize("method", ["fedkace", "ofcl", "dcfcl", "fedavg"])
def test_every_rule_learns_with_every_kind_of_mean(tmp_path: Path, rule: str, method: str) -> None:
    records = outcome(tmp_path, aggregation=rule, method=method, rounds=2, epochs=4)
    assert records[-1]["failures"] == []
    assert records[0]["accuracy"] > records[0]["chance"]
