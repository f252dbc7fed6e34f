"""A federation that is started once: it comes back after every process was killed, and machines join it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.common import SMALL
from support.systems.federation import Federation, until

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.living import stop

CHUNKS = 4
NODES = 3
STREAM = {**SMALL, "clients": NODES, "rounds": CHUNKS, "samples-per-class": 6}
KEYS = {
    **{name: value for name, value in STREAM.items() if name not in ("clients", "rounds", "samples-per-class")},
    "clients": NODES - 1,
    "rounds": 0,
    "dataset": "inbox",
    "class-names": ",".join("0123456789"),
    "image-size": 8,
    "inbox-bound": 12,  # a chunk, which is one file
}

pytestmark = [pytest.mark.slow, pytest.mark.federation, pytest.mark.timeout(1800)]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    chunks = tmp_path / "chunks"
    feed(Config.parse(STREAM), chunks)
    options = ["--nodes", str(NODES - 1), "--inboxes", "--node-config", f'test="{chunks / "client-0" / "test"}"']
    made = Federation(tmp_path, *options)
    try:
        yield made
    finally:
        made.script("stop")


def arrive(federation: Federation, node: int, chunk: int) -> None:
    """Put one of a node's files into its inbox."""
    path = sorted((federation.folder.parent / "chunks" / f"client-{node - 1}" / "new").iterdir())[chunk]
    shutil.move(path, federation.folder / f"node-{node}" / "inbox" / "new" / path.name)


def learned(federation: Federation, node: int) -> list[str]:
    """The files of a node that a round has learned, each as often as it was."""
    inbox = federation.folder / f"node-{node}" / "inbox"
    return sorted(path.name for part in ("taken/*.learned", "done/*") for path in inbox.glob(f"{part}/*.npz"))


def seats(federation: Federation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((federation.results / "living" / "members.json").read_text())["members"]
    return found


def test_a_federation_whose_processes_are_all_killed_goes_on_by_one_start_and_a_machine_joins_it(
    federation: Federation,
) -> None:
    keys = [f"{name}={json.dumps(value)}" for name, value in KEYS.items()]
    federation.must("service", federation.app, *keys, f'results-dir="{federation.results}"')
    federation.must("start")
    for node in (1, 2):
        arrive(federation, node, 0)
    federation.after_round("living", 1)

    federation.kill_all()
    assert federation.script("status").returncode == 1
    for node in (1, 2):
        arrive(federation, node, 1)
    federation.must("start")
    federation.after_round("living", 2)

    federation.must("add-node")
    arrive(federation, 3, 0)
    until(
        lambda: [seat["learned"] > 0 for seat in seats(federation)] == [True] * NODES,
        "the new node has a seat, and its samples are learned",
        log=federation.logs,
    )
    assert [seat["name"] for seat in seats(federation)] == ["node-1", "node-2", "node-3"]
    for seat in seats(federation):
        assert seat["cpu_seconds"]["total"] > 1 and seat["peak_memory"] > 100, "the import of PyTorch counts"
    for node in (1, 2):
        names = learned(federation, node)
        assert len(names) == len(set(names)) == 2, "each sample is learned once"

    stop(federation.results / "living")
    until(
        lambda: "run: finished:completed" in federation.script("status").stdout, "the service ends", log=federation.logs
    )
    assert (federation.results / "living" / "summary.json").exists()
    assert "finished:completed" in federation.must("start") and federation.script("status").returncode == 0
