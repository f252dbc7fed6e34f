"""A SuperNode whose SuperLink gives an answer that Flower does not retry."""

from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from support.systems.federation import environment, script
from support.systems.proxy import Authority, Recorder

from fedkace_flwr.experiments.running.ports import free_ports


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pull-messages", "send-node-heartbeat"])
def test_a_supernode_that_is_cut_off_for_good_ends_so_that_it_can_be_started_anew(call: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    answers = {
        "/v1/fleet/activate-node": (200, ActivateNodeResponse(node_id=7).SerializeToString()),
        "/v1/fleet/send-node-heartbeat": (200, SendNodeHeartbeatResponse(success=True).SerializeToString()),
        f"/v1/fleet/{call}": (500, b""),
    }
    with Recorder(authority.folder, answers) as superlink:
        settings = {
            "FEDKACE_SUPERLINK": f"localhost:{superlink.port}",
            "FEDKACE_CA": str(authority.folder / "ca.crt"),
            "FEDKACE_KEY": str(authority.key("edge-1")),
            "FEDKACE_NODE": "edge-1",
            "FEDKACE_STATE": str(tmp_path / "state"),
            "FEDKACE_RUNTIME_PORT": str(free_ports(1)[0]),
        }
        done = script("supernode.sh", env=environment(tmp_path) | settings)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "SuperNode ID: 7" in said and "500 Internal Server Error" in said, said
