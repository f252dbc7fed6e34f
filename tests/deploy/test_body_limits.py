"""The hub's nginx accepts the largest requests that SuperNodes make, and little more.

The sizes are those of Flower's own objects, of replies that clients gave.
"""

import re
from collections.abc import Callable, Iterable

import pytest
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from support.systems.federation import DEPLOY

from fedkace_flwr import client_app, server_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import folding, wire

MEGABYTE = 2**20

pytestmark = pytest.mark.slow


def limits() -> dict[str, int]:
    """Return the largest bodies that the file allows, in bytes: of a piece of a model, and of all other calls."""
    units = {"k": 1024, "m": MEGABYTE}
    found = re.findall(r"client_max_body_size (\d+)([km]);", (DEPLOY / "nginx.conf").read_text())
    piece, other = (int(number) * units[unit] for number, unit in found)
    return {"piece": piece, "other": other}


class Replies(InlineGrid):
    """The inline engine's grid; keeps the replies' contents, folded as between machines."""

    def __init__(self, config: Config) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self.kept: list[RecordDict] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        self.kept += [folding.folded(reply.content) for reply in replies if reply.has_content()]
        return replies


def largest_body(content: RecordDict) -> int:
    """Size of the largest request by which a SuperNode would send one of a message's objects."""
    objects = get_all_nested_objects(content)
    fields = {"node": Node(node_id=2**64 - 1), "run_id": 2**64 - 1, "session_id": "x" * 64}
    return max(
        PushObjectRequest(object_id=name, object_content=each.deflate(), **fields).ByteSize()  # type: ignore[arg-type]
        for name, each in objects.items()
    )


@pytest.mark.parametrize("secagg", [False, True])
def test_the_limit_is_what_a_model_needs(secagg: bool, small: Callable[..., Config]) -> None:
    """A masked update needs 8 bytes for each parameter; anything else is cut into pieces of 5 MiB."""
    config = small(secagg=secagg, rounds=1, width=8)
    grid = Replies(config)
    server_app.run(grid, config, run_id=1)
    parameters = sum(weight.numel() for weight in Experiment(config).initial_weights().values())
    masked = 8 * parameters + MEGABYTE // 4  # docs/deployment.md and the file itself give this formula
    largest = max(map(largest_body, grid.kept))
    assert 8 * parameters < largest < masked if secagg else largest < limits()["piece"]
    assert masked < limits()["piece"]


def test_the_limits_fit_the_largest_model_of_the_paper_and_its_masked_smaller_one() -> None:
    """ImageNet100's model is cut into pieces, CIFAR-100's goes through with masks as well; so do lists of objects."""
    wide = as_arrays(Experiment(Config.parse({"width": 64})).initial_weights())
    content = wire.reply_content(wide, 1, {})
    assert 5 * MEGABYTE < largest_body(folding.folded(content)) < limits()["piece"]
    assert 5 * MEGABYTE < largest_body(content) < limits()["piece"]
    parameters = sum(array.size for array in wide.values())
    of_cifar = Experiment(Config.parse({"width": 16})).initial_weights()
    assert 8 * sum(weight.numel() for weight in of_cifar.values()) + MEGABYTE // 4 < limits()["piece"] < 8 * parameters
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 0
    message = Message(content, dst_node_id=1, message_type="train")
    push = PushMessagesRequest(messages_list=[message_to_proto(remove_content_from_message(message))])
    push.message_object_trees.append(get_object_tree(message))
    assert push.ByteSize() < limits()["other"]
