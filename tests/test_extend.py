"""Networks, data sets and methods of other packages, as docs/extend.md describes them."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import MessageType
from support.common import SMALL, rounds_of
from support.made.arrays import write_arrays
from support.made.plugins import declared, plugins_forgotten
from support.systems.runs import run

from fedkace_flwr import plugins
from fedkace_flwr.config import Config, all_keys
from fedkace_flwr.config_docs import markdown
from fedkace_flwr.errors import ConfigError, PolicyError
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.inference.model_files import load_newest
from fedkace_flwr.privacy.site_policy import read_policy
from fedkace_flwr.results.run_folder import differences
from fedkace_flwr.storage import atomic, client_state

ROOT = Path(__file__).resolve().parents[1]
Make = Callable[..., Config]
ADDED = {"network": "filters", "dataset": "vibrations", "method": "fedper"}
TINY: dict[str, Any] = {**SMALL, "rounds": 2, "clients": 2, "width": 2, "capacity": 8}
TINY_NAMED = {key.replace("-", "_"): value for key, value in TINY.items()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, and the package that they make, installed in ``site``."""
    folder = tmp_path_factory.mktemp("additions")
    text = (ROOT / "docs" / "extend.md").read_text()
    files = re.findall(r"`([\w.]+)`[^`\n]*:\n\n```\w+\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in files] == ["pyproject.toml", "my_additions.py", "additions.yaml"]
    for name, body in files:
        (folder / name).write_text(body)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(folder)], check=True, cwd=folder)
    return folder


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test adds to the registries of this process is gone afterwards."""
    with plugins_forgotten():
        yield


@pytest.fixture
def installed(page: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(page / "site")
    return page


@pytest.mark.slow
def test_the_package_of_the_page_is_short_and_its_clients_keep_their_output_layers(
    installed: Path, small: Make, tmp_path: Path
) -> None:
    code = (installed / "my_additions.py").read_text()
    assert len([line for line in code.splitlines() if line]) <= 60
    learning = {"rounds": 4, "epochs": 20, "capacity": 40, "width": 32, "learning_rate": 0.03, "keep_models": "always"}
    config = small(**(TINY_NAMED | ADDED | learning))
    grid, first = run(config), as_arrays(Experiment(config).initial_weights())
    records = rounds_of(tmp_path / "run")
    assert [record["failures"] for record in records] == [[]] * 4
    assert records[-1]["accuracy"] > 0.5
    assert not (tmp_path / "run" / "model").exists()
    sent = grid.model_sent(MessageType.EVALUATE, 4, 0)
    assert sent["output.weight"].tobytes() == first["output.weight"].tobytes()
    for client in range(2):
        reply, folder = grid.model_returned(4, client), tmp_path / "run" / "clients" / f"client-{client:03d}"
        assert list(reply) == ["filters.weight", "filters.bias"]
        kept = load_newest(folder).kept
        assert (kept.network, kept.class_names[0], list(kept.weights)) == ("filters", "sound", ["local"])
        model = kept.weights["local"]
        assert all(np.array_equal(model[name], array) for name, array in reply.items())
        arrays, _ = atomic.read(folder / "state-000003.npz", client_state.VERSION)
        before = arrays["extra.output.weight"]
        moved = [np.linalg.norm(model["output.weight"] - start) for start in (before, first["output.weight"])]
        assert 0 < moved[0] < moved[1], "training goes on from the client's own output layer"


@pytest.mark.slow
def test_the_other_part_may_stay_and_the_bytes_are_those_of_what_is_sent(
    installed: Path, small: Make, tmp_path: Path
) -> None:
    sizes = {}
    for name, given in (
        ("er", {"method": "er", "predict_with": "local"}),
        *((part, {"fedper_keeps": part}) for part in ("output", "body")),
    ):
        run_inline(small(**(TINY_NAMED | ADDED | {"rounds": 1} | given), run_name=name))
        (record,) = rounds_of(tmp_path / name)
        assert record["failures"] == []
        sizes[name] = record["bytes"]["up"]
    output = 4 * (2 * 4 + 4) + 2 * 128 + len("output.weight" + "output.bias")
    assert sizes["er"] - sizes["output"] == 2 * output
    assert (
        0 < sizes["er"] - sizes["body"] == 2 * (4 * (2 * 2 * 15 + 2) + 2 * 128 + len("filters.weight" + "filters.bias"))
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dataset": "digits"}, r"network = 'filters': takes series, .* has the shape \(3, 8, 8\)"),
        ({"network": "resnet18"}, r"network = 'resnet18': takes pictures, .* has the shape \(2, 64\)"),
        ({"trainable": "output"}, "method = 'fedper': its clients' replies hold no array of network = 'filters'"),
        ({"gate": "hold"}, "gate = 'hold' with method = 'fedper': each client keeps a part of its own"),
        ({"predict_with": "mean"}, "predict-with = 'mean': method = 'fedper' sets it to 'local'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    installed: Path, small: Make, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run_inline(small(**(TINY_NAMED | ADDED | given)))
    assert not (tmp_path / "run").exists()


def run_its_study(page: Path, settings: dict[str, Any], *options: str) -> None:
    """In processes of their own, which find the package where Python finds packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(page / "site")])}
    command = [sys.executable, "-m", "experiments", "run", "additions.yaml", "--only=fedper", *options]
    command += [f"--set={key}={value}" for key, value in settings.items()]
    done = subprocess.run(command, cwd=page, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^fedper_seed-7 .*\d", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_its_study_runs_as_the_page_says(page: Path) -> None:
    run_its_study(page, TINY, "--engine=inline")


@pytest.mark.slow
@pytest.mark.federation
@pytest.mark.timeout(600)
def test_its_study_runs_on_the_workers_of_ray(page: Path) -> None:
    run_its_study(page, {**TINY, "rounds": 1}, "--results=ray")


# Its keys


def test_its_keys_are_known_where_it_is_named_and_part_of_its_runs_alone(installed: Path) -> None:
    before = Config().flat()
    mine = Config.parse({"method": "fedper", "fedper-keeps": "body"})
    assert mine.flat()["fedper-keeps"] == "body"
    assert Config.parse(mine.flat()) == mine
    with pytest.raises(ConfigError, match="fedper-keeps = 'boddy'"):
        Config.parse({"method": "fedper", "fedper-keeps": "boddy"})
    assert Config().flat() == before and "fedper-keeps" not in Config.parse({"method": "er"}).flat()
    assert differences(mine.flat(), Config.parse({"method": "fedper"})) == ["fedper-keeps"]
    assert "fedper-keeps" not in markdown() and "fedper-keeps" in {name for _, name, _ in all_keys()}


def test_a_study_may_set_its_keys_for_methods_that_do_not_have_them(installed: Path, tmp_path: Path) -> None:
    study = load_study(installed / "additions.yaml", {}, tmp_path)
    assert len(study.runs) == 3
    configs = {config.method: config.flat() for config in study.runs.values()}
    assert configs["fedper"]["fedper-keeps"] == "output" and "fedper-keeps" not in configs["er"]


def test_a_site_may_rule_over_its_keys_and_refuse_it(installed: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[keys]\nfedper-keeps = ['output']\nnetwork = ['resnet18']\n")
    site, plain = read_policy(policy), Config.parse({"method": "fedper"})
    site.check(plain, plain, sends_labels=False)
    site.check(Config(), Config(), sends_labels=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"fedper-keeps": "body"}, "fedper-keeps = 'body'"),
        ({"network": "filters"}, "network = 'filters'"),
    ]
    for values, named in cases:
        config = Config.parse({"method": "fedper", **values})
        with pytest.raises(PolicyError, match=named):
            site.check(config, config, sends_labels=False)


VOLUMES = """
import torch
from fedkace_flwr.networks.network import Network

class Net(Network):
    def __init__(self, blueprint):
        super().__init__()
        self.convolution = torch.nn.Conv3d(blueprint.shape[0], 4, 2)
        self.output = torch.nn.Linear(4, blueprint.num_classes)

    def embed(self, x):
        return self.convolution(x).relu().mean((2, 3, 4))
"""


def test_a_network_may_take_volumes(
    small: Make, forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared(tmp_path / "site", "network", "theirs", "made_volumes:Net", made_volumes=VOLUMES)
    monkeypatch.syspath_prepend(tmp_path / "site")
    data = write_arrays(tmp_path / "data", (1, 4, 4, 4))
    run_inline(small(network="theirs", dataset="arrays", data_dir=str(data), window=2, overlap=1))
    assert load_newest(tmp_path / "run" / "model").kept.shape == (1, 4, 4, 4)


# What can go wrong


@pytest.mark.parametrize(
    ("kind", "value", "code", "reason"),
    [
        ("network", "made_gone:Net", None, r"cannot be loaded \(ModuleNotFoundError: No module named 'made_gone'\)"),
        ("dataset", "made_bad:DATA", "raise SystemExit('enough')", r"cannot be loaded \(SystemExit: enough\)"),
        ("network", "made_bad:net", "def net(blueprint): return 3", "builds a int; must be a Network"),
        ("network", "made_bad:net", "def net(blueprint): return 1 / 0", r"cannot be built \(ZeroDivisionError: "),
        (
            "network",
            "made_bad:Net",
            "import torch\nfrom fedkace_flwr.networks.network import Network\nclass Net(Network):\n"
            "  def __init__(self, blueprint):\n    super().__init__()\n"
            "    self.output = torch.nn.Linear(5, blueprint.num_classes)\n  def embed(self, x): return x\n",
            r"makes \(3,\) features of a sample; must be 5, the inputs of its output",
        ),
        *(
            (
                "network",
                "made_bad:Net",
                "import torch\nfrom fedkace_flwr.networks.network import Network\nclass Net(Network):\n"
                f"  def __init__(self, blueprint):\n    super().__init__()\n    {line}\n"
                "    self.output = torch.nn.Linear(3, blueprint.num_classes)\n  def embed(self, x): return x\n",
                reason,
            )
            for line, reason in (
                (
                    "self.register_buffer('mask', torch.tensor([-torch.inf]))",
                    "has a state with 'mask', which is not finite; register it with persistent=False",
                ),
                (
                    "self.a = self.b = torch.nn.Linear(2, 2)",
                    "has one array under two names, 'a.weight' and 'b.weight'; must have one",
                ),
            )
        ),
        ("dataset", "made_bad:DATA", "DATA = 3", r"must be a fedkace_flwr\.data\.readers\.Source"),
        ("method", "made_bad:METHOD", "METHOD = 3", r"must be a fedkace_flwr\.registry\.Method"),
        (
            "method",
            "made_bad:METHOD",
            "from dataclasses import replace\nfrom fedkace_flwr.registry import METHODS\n"
            "METHOD = replace(METHODS['er'], preset={'epoch': 1})\n",
            r"cannot be added \(its preset names unknown keys, epoch\)",
        ),
    ],
)
def test_what_is_broken_is_named_in_one_line_and_harms_no_other_run(
    small: Make,
    forgotten: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    value: str,
    code: str | None,
    reason: str,
) -> None:
    site = tmp_path / "site"
    declared(site, kind, "theirs", value, **({} if code is None else {"made_bad": code}))
    monkeypatch.syspath_prepend(site)
    wanted = rf"{kind} = 'theirs': entry point {value} of broken 1\.0 {reason}"
    with pytest.raises(ConfigError, match=wanted) as refusal:
        run_inline(small(**{kind: "theirs"}))
    assert len(str(refusal.value).splitlines()) == 1
    with pytest.raises(ConfigError, match="unknown key epoch = 1; did you mean epochs"):
        small(epoch=1)  # looks for the key in all methods
    Experiment(small())
    assert not (tmp_path / "run").exists()


def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Make) -> None:
    for package in ("one", "two"):
        declared(tmp_path / "site", "network", "theirs", f"made_{package}:Net", package)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(ConfigError, match=r"network = 'theirs': .* several packages, .*one must be uninstalled"):
        Experiment(small(network="theirs"))


def test_own_names_are_not_replaced_and_the_attempt_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Make, caplog: pytest.LogCaptureFixture
) -> None:
    declared(tmp_path / "site", "network", "resnet18", "made_up:Net", "rival")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with caplog.at_level(logging.WARNING):
        run_inline(small(rounds=1, clients=2))
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == (
        "network = 'resnet18': is fedkace_flwr's own; the entry point of the same name of rival 1.0 is ignored"
    )


def test_names_that_could_lead_out_of_a_folder_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set's name is a part of the path of its cache."""
    declared(tmp_path / "site", "dataset", "../../theirs", "made_up:DATA")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert plugins.found("dataset") == []


def test_an_unknown_name_is_answered_with_all_known_ones(installed: Path, small: Make) -> None:
    for kind, near in (("network", "filter"), ("dataset", "vibration"), ("method", "fedpr")):
        with pytest.raises(ConfigError, match=f"{kind} = '{near}': must be one of .*did you mean {ADDED[kind]}?"):
            run_inline(small(**{kind: near}))


def test_a_methods_own_messages_reach_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Make, forgotten: None
) -> None:
    """The app routes messages by kind, and another package's kinds are unknown when it is made."""
    code = """
from dataclasses import replace
from flwr.app import RecordDict
from fedkace_flwr.clients.base import Acted
from fedkace_flwr.clients.er import ReplayClient
from fedkace_flwr.messaging import wire
from fedkace_flwr.registry import METHODS
from fedkace_flwr.strategies.base import ServerRule

class Client(ReplayClient):
    def act(self, action, content, round_number):
        return Acted(wire.reply_content(None, self.number + 1, {}), None)

class Server(ServerRule):
    def between(self, now, arrays):
        asked = {client: RecordDict() for client in range(now.clients)}
        got = now.ask("counting", "query.count", asked, lambda client, reply: reply.metric_records[wire.METRICS])
        now.report.own["counted"] = [got[client][wire.EXAMPLES] for client in sorted(got)]
        return arrays

METHOD = replace(METHODS["er"], server=Server, client=Client, actions=("query.count",), is_mean=False)
"""
    declared(tmp_path / "site", "method", "counting", "made_counting:METHOD", "counting", made_counting=code)
    monkeypatch.syspath_prepend(tmp_path / "site")
    run_inline(small(method="counting", rounds=1))
    (record,) = rounds_of(tmp_path / "run")
    assert record["failures"] == [] and record["counted"] == [1, 2, 3]
