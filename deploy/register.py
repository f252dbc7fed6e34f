"""Register the public keys of SuperNodes with the SuperLink, and write down which node has which name and seat.

``register.sh`` calls this file. Flower's own command (up to 1.42) tells the node id of a key only at its first
registration; the SuperLink's list of nodes, which this file reads, has the keys too.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import click
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

Registry = dict[int, tuple[str, int | None]]
"""Name and seat of each node, by its id."""


def stop(text: str) -> NoReturn:
    """End with one line."""
    sys.exit(f"error: {text}")


def read(file: Path) -> Registry:
    """Return what a file of nodes holds: lines ``NODE_ID NAME [SEAT]``."""
    found: Registry = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), start=1):
        words = line.split()
        if len(words) not in (2, 3) or not all(word.isdecimal() for word in (words[0], *words[2:])):
            stop(f"{file}, line {number}: '{line}': must be NODE_ID NAME [SEAT]")
        found[int(words[0])] = (words[1], int(words[2]) if words[2:] else None)
    return found


def write(file: Path, nodes: Registry) -> None:
    """Replace the file at once; others may read it, such as the ServerApp."""
    lines = (f"{node} {name}{'' if seat is None else f' {seat}'}\n" for node, (name, seat) in nodes.items())
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as aside:
        aside.write("".join(lines))
        aside.flush()
        os.fsync(aside.fileno())
    Path(aside.name).chmod(0o644)
    Path(aside.name).replace(file)


def register(connection: str, file: Path, keys: list[tuple[Path, str, int | None]]) -> None:
    """Register keys that are new, and bring the file up to date; end with code 3 if a key has been unregistered.

    Parameters
    ----------
    connection : str
        Name of the SuperLink in Flower's configuration.
    file : Path
        The file of nodes.
    keys : list of tuple
        File, name and seat of each key; without a seat a node keeps the one that it has.
    """
    nodes = read(file)
    with flwr_cli_exc_handler():
        client = init_http_client_from_connection(read_superlink_connection(connection))
        known = {node.public_key: node for node in client.ListNodes(ListNodesRequest()).nodes_info}
    gone = {node.node_id for node in known.values() if node.status == "unregistered"}
    here = {node.node_id for node in known.values()} - gone  # a SuperLink that has lost its database knows no node
    nodes = {node: entry for node, entry in nodes.items() if node in here}
    loaded, refused = [], False
    for path, name, seat in keys:
        key = load_ssh_public_key(path.read_bytes())
        assert isinstance(key, EllipticCurvePublicKey)  # register.sh has looked at it
        public = public_key_to_bytes(key)
        if public in known and known[public].node_id in gone:
            print(
                f"{name}: left out: {path} has been unregistered, which is for good; make another key with node-key.sh",
                file=sys.stderr,
            )
            refused = True
            continue
        own = known[public].node_id if public in known else None
        for node, (other, taken) in nodes.items():
            if seat is not None and taken == seat and node != own:
                stop(f"{path}: seat {seat} belongs to {other} (node {node}, {file}); unregister that node first")
        loaded.append((public, name, seat))
    try:
        for public, name, seat in loaded:
            told = "already registered"
            if public in known:
                node = known[public].node_id
            else:
                with flwr_cli_exc_handler():
                    node = client.RegisterNode(RegisterNodeRequest(public_key=public, name=name)).node_id
                told = "registered"
            nodes[node] = (name, nodes[node][1] if seat is None and node in nodes else seat)
            print(f"{name}: {told}", flush=True)
    finally:
        write(file, nodes)
    if refused:
        sys.exit(3)


if __name__ == "__main__":
    given = [tuple(text.split("\n")) for text in sys.argv[3:]]
    wanted = [(Path(path), name, int(seat) if seat else None) for path, name, seat in given]
    seats = [seat for _, _, seat in wanted if seat is not None]
    if len(set(seats)) < len(seats):
        stop("two of the keys are given the same seat")
    target = Path(sys.argv[2])
    if not os.access(target.parent, os.W_OK):
        stop(f"FEDKACE_NODES = {target}: its folder does not exist or cannot be written to")
    try:
        register(sys.argv[1], target, wanted)
    except click.ClickException as error:
        stop(" ".join(error.message.split()))
