"""Predictions for a table and for a series: from Python, by the command and by the service."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from support.made.arrays import NETWORK, SERIES, TABLE, arrays, write_arrays
from support.systems.service import served

from fedkace_flwr.config import Config
from fedkace_flwr.errors import DataError
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.export.loading import load_model
from fedkace_flwr.inference.array_input import read_samples
from fedkace_flwr.inference.predict import main


def npz(**content: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **content)
    return file.getvalue()


@pytest.fixture(params=[TABLE, SERIES], ids=["table", "series"])
def shape(request: pytest.FixtureRequest) -> tuple[int, ...]:
    found: tuple[int, ...] = request.param
    return found


@pytest.fixture
def model(small: Callable[..., Config], tmp_path: Path, shape: tuple[int, ...]) -> Path:
    """The model that a run leaves."""
    data = {"dataset": "arrays", "data_dir": str(write_arrays(tmp_path / "data", shape)), "network": NETWORK[shape]}
    run_inline(small(method="er", width=8, rounds=4, epochs=8, learning_rate=0.01, window=4, overlap=4, **data))
    return tmp_path / "run" / "model"


def test_a_model_of_arrays_answers_alike_everywhere(
    model: Path, tmp_path: Path, shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = arrays(shape)["x_test"], arrays(shape)["y_test"]
    loaded = load_model(model)
    labels, probabilities = loaded.predict(x)
    assert loaded.shape == shape and np.mean([int(label) for label in labels] == y) > 0.9
    assert loaded.predict(torch.from_numpy(x[7])).labels == labels[7:8]
    assert "float32" in (model / "README.md").read_text()

    (tmp_path / "one.json").write_text(json.dumps(x[7].tolist()))
    (tmp_path / "two.npz").write_bytes(npz(x=x[7:9]))
    (tmp_path / "odd.json").write_text("[1, 2")
    files = [str(tmp_path / name) for name in ("one.json", "two.npz", "odd.json")]
    assert main(["--model", str(model), *files, "--json"]) == 2
    said = capsys.readouterr()
    answers = json.loads(said.out)["answers"]
    assert [each["image"] for each in answers] == [files[0], f"{files[1]}[0]", f"{files[1]}[1]", files[2]]
    assert [each["classes"][0]["class"] for each in answers[:3]] == [labels[7], labels[7], labels[8]]
    assert answers[0]["classes"][0]["probability"] == pytest.approx(probabilities[7].max())
    assert "odd.json: it is neither numbers in JSON nor a .npz file" in said.err

    with served(model) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for content in (json.dumps(x[7].tolist()).encode(), npz(x=x[7])):
            reply = client.post("/predict", content=content)
            assert reply.status_code == 200 and reply.json()["classes"] == answers[0]["classes"]
        assert client.get("/model").json()["shape"] == list(shape)
        reply = client.post("/predict", content=npz(x=x[:2]))
        assert reply.status_code == 422 and "it holds 2 samples; must be one" in reply.text


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "neither numbers in JSON"),
        (b'{"x": [1, 2, 3]}', "no list of numbers"),
        (b"[1, 2, NaN]", "not finite"),
        (b"[1, 2, 1e300]", "not finite"),
        (b"[1, 2]", r"float32 of shape \(2,\); must be float32 of shape \(3,\) or \(n, 3\)"),
        (b"[[1, 2, 3], [1, 2]]", "neither numbers in JSON"),
        (b"[" * 100_000, "neither numbers in JSON"),
        (b"[true, true, true]", "no list of numbers"),
        (npz(y=np.zeros(3, np.float32)), "no .npz file with an array 'x'"),
        (npz(x=np.zeros(3)), "float64 of shape"),
        (npz(x=np.array([{}] * 3)), "an array of object"),
        (npz(x=np.zeros(3, np.float32))[:90], "no .npz file"),
        (b"PK\x01\x02" * 1000, "more than 64 parts"),
        (b" " * 5_000_000, "JSON of 5000000 bytes"),
    ],
    ids=range(14),
)
def test_what_does_not_fit_is_refused_in_one_line(content: bytes, fault: str) -> None:
    with pytest.raises(DataError, match=fault) as told:
        read_samples((3,), content)
    assert "\n" not in str(told.value)
