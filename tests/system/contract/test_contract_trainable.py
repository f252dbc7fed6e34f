"""Every method with each trainable part: what is frozen never changes and never travels, and everyone has it."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from safetensors.numpy import save_file
from support.systems.contract import (
    DISTINCT_METHODS,
    SHAPE,
    Make,
    assert_a_run_in_pieces_equals,
    assert_bytes_are_as_declared,
    watch,
)
from support.systems.runs import folder_of, last, ran, records

from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment, as_arrays, shared_experiment
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.inference.kept_models import MODEL
from fedkace_flwr.inference.model_files import load_newest, read_model
from fedkace_flwr.messaging import folding, wire
from fedkace_flwr.storage import atomic

PARTS = ("output", "norm", "lora")
OUTPUT = ("output.weight", "output.bias")


@pytest.mark.matrix
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("method", DISTINCT_METHODS)
def test_the_part_alone_trains_and_travels(small: Make, method: str, part: str) -> None:
    if part not in {"tfcl": (), "afl": ("output",), "fed-talora": ("lora",)}.get(method, PARTS):
        with pytest.raises(ConfigError, match=rf"trainable = '{part}'.*(must be '(all|output)'|sets it to 'lora')"):
            configured(small(method=method, trainable=part))
        return
    config = small(method=method, trainable=part, **SHAPE)
    watched = watch(config)
    assert_bytes_are_as_declared(watched)
    names, found = set(Experiment(config).travelling.sent), records(config)
    assert all(record["failures"] == [] and record["accuracy"] is not None for record in found)
    assert names == set(OUTPUT) if part == "output" else set(OUTPUT) < names
    assert set(last(config).weights) == (names if method != "centralized" else set())


@pytest.mark.matrix
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("method", ["fedkace", "dcfcl"])
def test_a_run_in_pieces_with_a_frozen_part_equals_a_whole_one(small: Make, method: str, part: str) -> None:
    own = {**SHAPE, "method": method, "trainable": part}
    whole = small(**own, run_name="whole")
    ran(whole)
    assert_a_run_in_pieces_equals(folder_of(whole), small(**own, resume=True))


@pytest.mark.parametrize("part", PARTS)
def test_models_are_whole_and_the_device_stores_what_trains(small: Make, part: str) -> None:
    """The local and the global model that a client predicts with, and the one that the run leaves."""
    several = {"predict_with": "mean", "recalibrate_batchnorm": True, "classifier": "fading", "keep_models": "always"}
    config = small(trainable=part, method="er-balanced", **several, **SHAPE)
    lines, experiment = ran(config), Experiment(config)
    assert not any(line["failures"] for line in lines)
    first, frozen = as_arrays(experiment.initial_weights()), experiment.frozen_weights
    client = folder_of(config) / "clients" / "client-000"
    models = [*load_newest(client).kept.weights.values(), read_model(folder_of(config) / MODEL).weights["global"]]
    for model in models:
        assert model.keys() == {name for name in first if "lora" not in name}
        changed = {name for name, array in frozen.items() if not np.array_equal(model[name], array)}
        assert (part == "lora") == bool(changed), "adapters are merged into the weights"
        assert not np.array_equal(model["output.weight"], first["output.weight"])
    left = folder_of(config) / MODEL / "adapters.safetensors"
    assert left.exists() == (part == "lora")
    if left.exists():
        started = Experiment(small(trainable=part, weights_file=str(left)))
        given, last_round = as_arrays(started.initial_weights()), last(config).weights
        assert all(np.array_equal(given[name], last_round[name]) for name in last_round if "lora" in name)
        assert started.frozen_digest == experiment.frozen_digest
    answer = atomic.read(atomic.path_of(client, "answer", 3), atomic.VERSION, lambda arrays, record: set(arrays))
    assert answer == set(experiment.travelling.sent)


@pytest.mark.parametrize(
    "keys",
    [
        {"dp": "local", "dp_seeded": True, "trainable": "lora"},
        {"dp": "central", "dp_seeded": True},
        {"secagg": True, "trainable": "lora"},
        {"batchnorm_statistics": "local"},
        {"aggregation": "multi-krum", "defence": "on"},
        {"server_optimiser": "adam:0.01"},
        {"gate": "hold"},
        {"attack": "stale-model"},
        {"output_layer": "simplex", "method": "fedframe", "trainable": "lora"},
    ],
    ids=lambda keys: next(iter(keys)),
)
@pytest.mark.slow
def test_what_handles_models_handles_the_part(small: Make, keys: dict[str, object]) -> None:
    lines = ran(small(**{"trainable": "norm", "clients": 4, **SHAPE, **keys}))
    assert len(lines) == 3 and not any(line["failures"] for line in lines)


class Devices(InlineGrid):
    """Nodes as on other machines: folders of their own, another weights file, folded messages, a new process for each."""

    def __init__(self, config: Config, folder: Path, weights_file: str, most: int = 1000) -> None:
        keys = {**config.flat(), "weights-file": weights_file}
        super().__init__(
            client_app.app,
            config.stream.clients,
            keys,
            1,
            lambda number: {"state-dir": str(folder / f"device-{number}")},
        )
        self._left = most

    def _answer(self, message: Message) -> Message:
        shared_experiment.cache_clear()
        self._left -= 1
        if self._left < 0:
            raise SystemExit("the server is killed")
        message.content = folding.marked(folding.folded(message.content), wire.CONFIG)
        return super()._answer(message)


@pytest.mark.parametrize(
    ("part", "theirs", "secagg"),
    [("output", "none.safetensors", False), ("norm", "none.pth", True), ("lora", "", False)],
)
def test_a_device_is_sent_the_frozen_part_that_it_lacks_once(
    small: Make, tmp_path: Path, part: str, theirs: str, secagg: bool
) -> None:
    save_file(as_arrays(Experiment(small(seed=99)).initial_weights()), tmp_path / "weights.safetensors")
    own = {
        **SHAPE,
        "trainable": part,
        "weights_file": str(tmp_path / "weights.safetensors"),
        "clients": 3,
        "secagg": secagg,
    }
    whole = small(**own, run_name="whole")
    ran(whole)
    config = small(**own, run_name="devices", resume=True)
    for most in (1, 2, 4, 1000):
        with contextlib.suppress(SystemExit):
            server_app.run(Devices(config, tmp_path, theirs, most), config, 1)
    extra = [
        each["bytes"]["down"] - other["bytes"]["down"]
        for each, other in zip(records(config), records(whole), strict=True)
    ]
    assert extra[1:] == [0, 0] and not any(each["failures"] for each in records(config))
    ours, others = (last(each).weights["output.weight"] for each in (config, whole))
    assert secagg or np.array_equal(ours, others)  # masked updates are rounded at random
    experiment = Experiment(config)
    for number in range(3):
        (kept,) = (tmp_path / f"device-{number}").glob("*/frozen-*")
        assert kept.stem == f"frozen-{experiment.frozen_digest}"


def test_a_frozen_part_comes_once_more_if_it_is_damaged_and_its_bytes_are_counted(small: Make, tmp_path: Path) -> None:
    save_file(as_arrays(Experiment(small(seed=99)).initial_weights()), tmp_path / "weights.safetensors")
    own = {**SHAPE, "trainable": "norm", "weights_file": str(tmp_path / "weights.safetensors"), "clients": 2}
    config, further = small(**{**own, "rounds": 1}), small(**{**own, "rounds": 2}, resume=True)
    server_app.run(Devices(config, tmp_path, "none.pth"), config, 1)
    (kept,) = (tmp_path / "device-1").glob("*/frozen-*")
    kept.write_bytes(kept.read_bytes()[:-1000])
    server_app.run(Devices(further, tmp_path, "none.pth"), further, 1)
    part = sum(len(name) + 128 + array.nbytes for name, array in Experiment(config).frozen_part.items())
    usual = watch(small(**{**own, "rounds": 2}, run_name="whole"))
    message = sum(wire.size_in_bytes(each.down) for each in usual.crossings if each.place == (MessageType.TRAIN, 1, 0))
    down = [line["bytes"]["down"] for line in records(further)]
    plain = [line["bytes"]["down"] for line in records(usual.config)]
    assert [down[0] - plain[0], down[1] - plain[1]] == [2 * (part + message), part + message]


def test_a_frozen_part_that_is_not_the_servers_is_refused(small: Make) -> None:
    config = small(trainable="output", **SHAPE)
    experiment = Experiment(config)
    grid = InlineGrid(client_app.app, 3, config.flat(), 1, lambda _: {})

    def answer(digest: str, **sent: wire.Weights) -> Message:
        record = ConfigRecord({wire.RUN: "1" * 20, wire.ROUND: 1, wire.CLIENT: 0, wire.FROZEN: digest})
        records = {name: wire.array_record(weights) for name, weights in {wire.ARRAYS: {}, **sent}.items()}
        content = RecordDict({**records, wire.CONFIG: record})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=MessageType.TRAIN)])
        return reply

    assert answer("0" * 64).content.config_records[wire.CONFIG][wire.FROZEN] == experiment.frozen_digest
    refused = answer("0" * 64, frozen=experiment.frozen_part)
    reason = wire.root_cause(refused.error.reason)
    assert f"frozen = {'0' * 64}" in reason and experiment.frozen_digest in reason
    short = dict(list(experiment.frozen_part.items())[1:])
    assert "arrays differ" in wire.root_cause(answer("0" * 64, frozen=short).error.reason)
    assert not list(folder_of(config).glob("clients/*/frozen-*"))


@pytest.mark.parametrize("part", PARTS)
def test_a_file_gives_the_frozen_part(small: Make, tmp_path: Path, part: str) -> None:
    told = as_arrays(Experiment(small(seed=99)).initial_weights())
    save_file(told, tmp_path / "weights.safetensors")
    from_file = Experiment(small(trainable=part, weights_file=str(tmp_path / "weights.safetensors")))
    drawn = Experiment(small(trainable=part))
    assert all(np.array_equal(array, told[name]) for name, array in from_file.frozen_weights.items())
    assert from_file.frozen_weights.keys() == drawn.frozen_weights.keys()
    assert len({each.frozen_digest for each in (from_file, drawn, Experiment(small(trainable=part, epochs=9)))}) == 2


def test_nothing_left_to_train_is_refused(small: Make) -> None:
    config = small(trainable="output", method="fedframe", width=2)
    with pytest.raises(ConfigError, match=r"trainable = 'output' with method = 'fedframe'.*nothing is left"):
        ran(config)
    with pytest.raises(ConfigError, match=r"trainable = 'norm'.*normalisation"):
        ran(small(trainable="norm", network="cnn"))
    assert not folder_of(config).exists()
