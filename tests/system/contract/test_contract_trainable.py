"""Every method with each trainable part: what is frozen never changes and never travels, and everyone has it."""

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

from fedkace_flwr import client_app
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.inference.kept_models import MODEL
from fedkace_flwr.inference.model_files import load_newest, read_model
from fedkace_flwr.messaging import wire
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


def test_a_client_with_another_frozen_part_is_refused(small: Make) -> None:
    config = small(trainable="output", **SHAPE)
    record = ConfigRecord({wire.RUN: "1" * 20, wire.ROUND: 1, wire.CLIENT: 0, wire.FROZEN: "0" * 64})
    content = RecordDict({wire.ARRAYS: wire.array_record({}), wire.CONFIG: record})
    grid = InlineGrid(client_app.app, 3, config.flat(), 1, lambda _: {})
    (reply,) = grid.send_and_receive([Message(content, dst_node_id=2, message_type=MessageType.TRAIN)])
    reason = wire.root_cause(reply.error.reason)
    assert "frozen = '000" in reason and Experiment(config).frozen_digest in reason and "weights-file" in reason


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
