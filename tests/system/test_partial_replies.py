"""Methods whose clients reply with part of the model: the server keeps what it has of the rest, and sends all."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import MessageType
from support.doubles.faults import only, with_array
from support.made.plugins import declared, plugins_forgotten
from support.systems.contract import assert_bytes_are_as_declared, watch
from support.systems.cut_off import cut_after_round
from support.systems.runs import folder_of, last, records, run, same

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.inference.model_files import load_newest

Make = Callable[..., Config]
CODE = """
from dataclasses import replace

from fedkace_flwr.clients.er import ReplayClient
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.registry import METHODS, Method, Traffic
from fedkace_flwr.strategies.base import ServerRule


def is_output(config, name):
    return name.startswith("output.")


def is_no_norm(config, name):
    return "norm" not in name and not name.startswith("stem.1.")



class HookedClient(ReplayClient):
    def reply(self, now, training):
        return {name: array for name, array in super().reply(now, training).items() if is_output(None, name)}


class HookedServer(ServerRule):
    def expected(self, now, content):
        return {name: shape for name, shape in now.shapes.items() if is_output(None, name)}


HEAD = Method(ReplayClient, is_mean=True, replies=is_output, traffic=Traffic(up="P + R"))
HOOKED = Method(HookedClient, server=HookedServer, is_mean=True)
NO_NORM = Method(ReplayClient, is_mean=True, replies=is_no_norm)
OWN = replace(METHODS["lkc"], replies=is_output)
COALITIONS = replace(METHODS["dcfcl"], replies=is_output)
NOTHING = Method(ReplayClient, replies=lambda config, name: False)
"""
METHODS = ("head", "hooked", "no-norm", "own", "coalitions", "nothing")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in METHODS:
        python = name.replace("-", "_")
        value = f"made_partial:{python.upper()}"
        declared(tmp_path / "site", "method", name, value, f"theirs_{python}", made_partial=CODE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with plugins_forgotten():
        yield


def held(config: Config) -> dict[str, np.ndarray[Any, Any]]:
    """The model with which a run begins."""
    return as_arrays(Experiment(config).initial_weights())


def is_in(method: str, name: str) -> bool:
    """Whether a method's replies hold an array."""
    return (
        ("norm" not in name and not name.startswith("stem.1.")) if method == "no-norm" else name.startswith("output.")
    )


@pytest.mark.parametrize("method", ["head", pytest.param("hooked", marks=pytest.mark.slow), "no-norm"])
def test_the_part_is_averaged_and_everyone_gets_the_whole_model(small: Make, method: str) -> None:
    """Also with the defence; what a client does not send is part of the local model with which it predicts."""
    config = small(method=method, defence="on", clients=4, predict_with="mean", keep_models="always")
    grid, first = run(config), held(config)
    assert [record["failures"] for record in records(config)] == [[], [], []]
    assert records(config)[-1]["client_drift"] > 0 and records(config)[-1]["accuracy"] > 0.1
    replies = [grid.model_returned(3, client) for client in range(4)]
    assert all([*reply] == [name for name in first if is_in(method, name)] for reply in replies)
    merged = grid.model_sent(MessageType.EVALUATE, 3, 0)
    assert list(merged) == list(first) == list(last(config).weights)
    for name, array in merged.items():
        if is_in(method, name):
            mean = np.mean([reply[name].astype(np.float64) for reply in replies], axis=0)
            np.testing.assert_allclose(array, mean, rtol=1e-5, atol=1e-6)
        else:
            assert array.tobytes() == first[name].tobytes()
    local = load_newest(folder_of(config) / "clients" / "client-000").kept.weights["local"]
    for name, array in local.items():
        assert np.array_equal(array, replies[0].get(name, first[name])) == is_in(method, name), name


@pytest.mark.parametrize(
    "method", ["head", *(pytest.param(name, marks=pytest.mark.slow) for name in ("own", "coalitions"))]
)
def test_a_run_that_was_cut_off_equals_an_undisturbed_one(
    small: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    own = {"method": method, "predict_with": "auto" if method == "own" else "mean", "recalibrate_batchnorm": True}
    whole, cut = small(**own, run_name="whole"), small(**own)
    run_inline(whole)
    cut_after_round(cut, 2, monkeypatch)
    run_inline(small(**own, resume=True))
    assert records(cut) == records(whole) and same(last(cut), last(whole))
    assert [record["failures"] for record in records(cut)] == [[], [], []]


def test_the_defence_judges_the_part(small: Make) -> None:
    grown = with_array("output.weight", np.full((10, 32), 50, np.float32))
    config = small(method="head", defence="on", clients=4, rounds=1)
    run(config, only(1, 1, grown))
    (record,) = records(config)
    assert [(each["client"], each["kind"]) for each in record["failures"]] == [(1, "norm")]


@pytest.mark.slow
def test_a_hostile_client_replies_with_the_part_too(small: Make) -> None:
    config = small(method="head", clients=4, rounds=2, attack="stale-model:2", hostile_clients=1)
    grid = run(config)
    first, sent, reply = held(config), grid.model_sent(MessageType.TRAIN, 2, 3), grid.model_returned(2, 3)
    assert list(reply) == ["output.weight", "output.bias"] and records(config)[1]["failures"] == []
    assert all(np.allclose(array, 2 * first[name] - sent[name], atol=1e-6) for name, array in reply.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["head", "hooked"])
def test_the_part_alone_is_masked(small: Make, method: str) -> None:
    plain, masked = small(method=method, rounds=1), small(method=method, rounds=1, secagg=True, run_name="masked")
    for config in (plain, masked):
        run_inline(config)
    first = held(plain)
    for name, array in last(masked).weights.items():
        if is_in("head", name):
            np.testing.assert_allclose(array, last(plain).weights[name], atol=1e-4)
        else:
            assert array.tobytes() == first[name].tobytes()
    whole = 3 * sum(array.nbytes for array in first.values())
    assert (records(masked)[0]["bytes"]["up"] > whole) == (method == "hooked") and records(masked)[0]["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize("dp", ["central", "local"])
def test_the_part_alone_is_noised(small: Make, dp: str) -> None:
    config = small(method="head", rounds=1, dp=dp, dp_clip=0.1, dp_noise=0.01, dp_seeded=True)
    run_inline(config)
    first = held(config)
    moved = [name for name, array in last(config).weights.items() if array.tobytes() != first[name].tobytes()]
    assert moved == ["output.weight", "output.bias"] and records(config)[0]["failures"] == []


@pytest.mark.slow
def test_statistics_that_stay_on_the_device_are_those_of_its_local_model(small: Make) -> None:
    config = small(method="head", rounds=2, batchnorm_statistics="local", keep_models="always", predict_with="global")
    grid = run(config)
    stem = "stem.1.running_mean"
    kept = load_newest(folder_of(config) / "clients" / "client-000").kept.weights["global"]
    assert not np.array_equal(kept[stem], grid.model_sent(MessageType.EVALUATE, 2, 0)[stem])


def test_the_bytes_are_those_of_the_part(small: Make) -> None:
    assert_bytes_are_as_declared(watch(small(method="head", rounds=1)))


def test_a_part_without_arrays_is_refused_before_the_run(small: Make) -> None:
    config = small(method="nothing")
    with pytest.raises(
        ConfigError, match="method = 'nothing': its clients' replies hold no array of network = 'resnet18'"
    ):
        run_inline(config)
    assert not folder_of(config).exists()
