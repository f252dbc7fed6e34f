"""Differential privacy: what is clipped and noised, with what noise, and what it is worth."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, Metadata, RecordDict
from support.common import rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError, MessageError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.travelling import Travelling
from fedkace_flwr.messaging.wire import Reply, Weights
from fedkace_flwr.privacy import noise
from fedkace_flwr.privacy.accounting import epsilon, spent
from fedkace_flwr.privacy.client_mods import guarded
from fedkace_flwr.registry import METHODS
from fedkace_flwr.sections import PrivacyConfig
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage.checkpoint import Checkpoints
from fedkace_flwr.strategies.fedavg import FedAvg

Make = Callable[..., Config]
PARAMETERS = frozenset({"conv", "bias"})
SENT: dict[str, Any] = {
    "conv": np.full((60, 50), 0.1, np.float32),
    "bias": np.zeros(9, np.float32),
    "bn.running_mean": np.zeros(40, np.float32),
    "bn.running_var": np.ones(40, np.float32),
    "bn.num_batches_tracked": np.array(7, np.int64),
}
FLOATS = [name for name in SENT if not name.endswith("tracked")]


def learned(seed: int = 1) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    moved = {name: SENT[name] + random.normal(0, 0.1, SENT[name].shape).astype(np.float32) for name in FLOATS}
    return {**moved, "bn.num_batches_tracked": np.array(10**6, np.int64)}


def arriving(content: RecordDict) -> Message:
    """A training message as a SuperNode hands it to its client."""
    metadata = Metadata(1, "m", 1, 2, "", "", 0.0, 1e12, MessageType.TRAIN)
    return Message(content, metadata=metadata)  # type: ignore[call-overload]  # for Flower's own use


def device() -> Context:
    return Context(1, 2, {}, RecordDict(), {})


def left(config: Config, model: Weights, place: Context | None = None, client: int = 0, number: int = 1) -> Weights:
    """What leaves a client that has learned a model."""
    content = wire.instruction(wire.array_record(SENT), {}, client, number)
    message = arriving(content)

    def handler(message: Message, context: Context) -> Message:
        return Message(wire.reply_content(model, 5, {}), reply_to=message)

    reply = guarded(handler, config, Travelling.of(wire.shapes_of(SENT), PARAMETERS, config).update)(
        message, place or device()
    )
    assert not reply.has_error() and list(reply.content.array_records) == [wire.ARRAYS]
    return wire.unpack(reply.content.array_records[wire.ARRAYS])


def asked(**told: Any) -> Config:
    return Config.parse({name.replace("_", "-"): value for name, value in told.items()})


def vector(model: Weights, names: list[str] = FLOATS) -> np.ndarray[Any, Any]:
    return np.concatenate([(model[name].astype(np.float64) - SENT[name]).ravel() for name in names])


def test_without_keys_of_privacy_a_model_leaves_as_it_is() -> None:
    model = learned()
    found = left(asked(), model)
    assert all(found[name].tobytes() == model[name].tobytes() for name in model)


@pytest.mark.parametrize("statistics", ["shared", "local"])
def test_an_update_is_clipped_to_its_norm_and_keeps_its_direction(statistics: str) -> None:
    model = learned()
    found = left(asked(dp="central", dp_clip=0.5, batchnorm_statistics=statistics), model)
    names = FLOATS if statistics == "shared" else ["conv", "bias"]
    before, after = vector(model, names), vector(found, names)
    assert np.linalg.norm(before) > 1 and np.linalg.norm(after) == pytest.approx(0.5, rel=1e-4)
    assert before @ after == pytest.approx(np.linalg.norm(before) * 0.5, rel=1e-4)
    assert found["bn.num_batches_tracked"] == SENT["bn.num_batches_tracked"]
    if statistics == "local":
        assert all(found[name].tobytes() == SENT[name].tobytes() for name in SENT if name.startswith("bn."))
    small = left(asked(dp="central", dp_clip=1e4, batchnorm_statistics=statistics), model)
    np.testing.assert_allclose(vector(small, names), before, atol=1e-6)


def test_local_noise_has_its_deviation_and_variances_stay_positive() -> None:
    config, model = asked(dp="local", dp_clip=2.0, dp_noise=0.75), learned()
    found = left(config, model)
    clean = left(asked(dp="central", dp_clip=2.0), model)
    drawn = vector(found, ["conv"]) - vector(clean, ["conv"])
    assert drawn.std() == pytest.approx(1.5, rel=0.08) and abs(drawn.mean()) < 5 * 1.5 / np.sqrt(drawn.size)
    assert found["bn.running_var"].min() == 0.25, "noise of 1.5 would have made some of the forty negative"
    assert found["bn.num_batches_tracked"] == SENT["bn.num_batches_tracked"]


def test_a_round_asked_for_again_gets_the_same_noise_and_anything_else_another() -> None:
    config, model, place = asked(dp="local"), learned(), device()
    first, again = left(config, model, place), left(config, model, place)
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)

    def noise_of(found: Weights, of: Weights) -> np.ndarray[Any, Any]:
        return vector(found, ["conv"]) - vector(left(asked(dp="central"), of), ["conv"])

    mine = noise_of(first, model)
    for other in (noise_of(left(config, model), model), noise_of(left(config, learned(2), place), learned(2))):
        assert abs(np.corrcoef(mine, other)[0, 1]) < 5 / np.sqrt(mine.size)


def test_seeded_noise_is_known_to_who_knows_the_seed_and_differs_by_client_and_round() -> None:
    config, model = asked(dp="local", dp_seeded=True), learned()
    first = left(config, model)["conv"]
    assert first.tobytes() == left(config, model)["conv"].tobytes()
    places: tuple[dict[str, Any], ...] = ({"client": 1}, {"number": 2})
    for place in places:
        assert first.tobytes() != left(config, model, **place)["conv"].tobytes()


def test_noise_leaves_numpys_own_generator_as_it_was() -> None:
    np.random.seed(3)  # noqa: NPY002
    wanted = np.random.normal(size=4)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    left(asked(dp="local"), learned())
    np.testing.assert_array_equal(np.random.normal(size=4), wanted)  # noqa: NPY002


def test_an_update_of_nothing_is_refused_in_a_line() -> None:
    with pytest.raises(MessageError, match="the local model is the one that was sent"):
        left(asked(dp="local"), copy.deepcopy(SENT))


def test_central_noise_on_the_mean_has_its_deviation() -> None:
    settings = PrivacyConfig(dp="central", dp_clip=2.0, dp_noise=3.0)
    mean = learned()
    found = noise.noised_mean(mean, SENT, FLOATS, 4, settings, noise.fresh_secret())
    drawn = vector(found, ["conv"]) - vector(mean, ["conv"])
    assert drawn.std() == pytest.approx(3 * 2 / 4, rel=0.08)
    assert found["bn.running_var"].min() == 0.25 and found["bn.num_batches_tracked"] == 7
    assert {name: array.dtype for name, array in found.items()} == {name: SENT[name].dtype for name in SENT}


@pytest.mark.parametrize(
    ("deviation", "rounds", "value"),
    [(1.0, 1, 4.37717810), (1.0, 15, 23.34631069), (4.0, 15, 4.21683588), (0.5, 15, 62.24070489)],
)
def test_epsilon_is_that_of_a_numerical_accountant(deviation: float, rounds: int, value: float) -> None:
    """Values of the privacy-loss-distribution accountant of dp-accounting 0.6, for delta = 1e-5."""
    assert epsilon(deviation, rounds, 1e-5) == pytest.approx(value, rel=1e-6)


def test_epsilon_grows_with_rounds_and_a_local_model_needs_twice_the_noise() -> None:
    assert epsilon(2, 9, 1e-5) == pytest.approx(epsilon(2 / 3, 1, 1e-5))
    assert spent(PrivacyConfig(), 3) == {}
    assert spent(PrivacyConfig(dp="local", dp_noise=2.0), 3) == spent(PrivacyConfig(dp="central", dp_noise=1.0), 3)
    assert spent(PrivacyConfig(dp="central", dp_noise=0.0), 3) == {"epsilon": None, "delta": 1e-5}
    assert epsilon(1e9, 1, 1e-5) == 0.0 and np.isfinite(epsilon(1e-4, 100, 1e-5))


@pytest.mark.parametrize("told", [{"dp": "local"}, {"dp": "central"}, {"batchnorm-statistics": "local"}])
def test_only_methods_that_merge_by_a_mean_may_ask(small: Make, told: dict[str, Any]) -> None:
    for name, method in METHODS.items():
        if method.is_mean:
            assert configured(small(method=name, **told))
        else:
            with pytest.raises(
                ConfigError, match=rf"with method = '{name}': its server needs more than the mean of the models"
            ):
                configured(small(method=name, **told))


def test_a_device_takes_no_noise_from_a_seed() -> None:
    inbox = {"dataset": "inbox", "class-names": "a,b", "image-size": 8}
    assert Config.parse({**inbox, "dp": "local"})
    with pytest.raises(ConfigError, match=r"^dp-seeded = true: for simulation alone"):
        Config.parse({**inbox, "dp": "local", "dp-seeded": True})


def test_samples_do_not_weigh_where_noise_is_measured_for_equal_weights(small: Make) -> None:
    def weight(config: Config) -> float:
        return FedAvg(config).weight(Reply(0, {}, 40, {}))

    assert weight(small(method="fedavg")) == 40
    assert weight(small(method="fedavg", dp="central")) == weight(small(method="fedavg", secagg=True)) == 1


@pytest.mark.slow
def test_a_run_reports_epsilon_and_no_classes(small: Make) -> None:
    for name, told in (("plain", {}), ("noised", {"dp": "central", "dp_noise": 0.1})):
        run_inline(small(run_name=name, rounds=2, **told))
    folder = Path(small().run.results_dir)
    plain, noised = rounds_of(folder / "plain"), rounds_of(folder / "noised")
    assert all("epsilon" not in record and record["buffer_classes"][0] for record in plain)
    assert [record["epsilon"] for record in noised] == [epsilon(0.1, 1, 1e-5), epsilon(0.1, 2, 1e-5)]
    assert not any(any(record.get("buffer_classes") or []) for record in noised)


def test_epsilon_counts_the_rounds_of_the_client_that_is_asked_most(small: Make) -> None:
    config = small(clients=4, rounds=6, fraction_train=0.5, away="1:1-5, 2:1-5, 3:1-5", dp="central")
    run_inline(config)
    asked: Counter[int] = Counter()
    for record in rounds_of(Path(config.run.results_dir) / "run"):
        present = config.stream.members(record["round"])
        asked.update(config.stream.participants(record["round"], config.run.seed, present))
        assert record["epsilon"] == epsilon(1.0, max(asked.values()), 1e-5)


def test_statistics_that_stay_at_home_are_each_clients_own(small: Make) -> None:
    config = small(rounds=2, batchnorm_statistics="local", evaluate="both")
    run_inline(config)
    folder = Path(config.run.results_dir) / "run"
    kept = Checkpoints(folder / "server").newest()
    assert kept is not None
    name = next(name for name in kept.weights if name.endswith("running_var"))
    assert (kept.weights[name] == 1).all(), "the server has only ever seen what it began with"
    own = []
    for path in sorted((folder / "clients").glob("client-*/answer-*.npz")):
        content = durable.read(path)
        assert content is not None
        own.append(content[0])
    assert len(own) == 3 and len({arrays[name].tobytes() for arrays in own}) == 3
    counter = name.replace("running_var", "num_batches_tracked")
    steps = {int(arrays[counter]) for arrays in own}
    assert steps == {2}, "one step a round: the second round went on from the first one's statistics"


def test_configurations_of_devices_are_told_nothing_secret() -> None:
    """The secret lies in the SuperNode's own state, not in what is sent."""
    place = device()
    left(asked(dp="local"), learned(), place)
    (record,) = place.state.config_records.values()
    assert isinstance(record, ConfigRecord) and len(record["secret"]) == noise.SECRET_BYTES  # type: ignore[arg-type]
