"""A federation in this process, driven message by message."""

from pathlib import Path

import torch
from flwr.app import Message, MessageType

from fedkace_flwr import client_app
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.experiments.running.inline import InlineGrid
from fedkace_flwr.messaging import wire
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore


class Federation:
    """Sends one message at a time to the real ClientApp."""

    def __init__(self, config: Config, nodes: int | None = None) -> None:
        self.config = config
        self.experiment = Experiment(config)
        self.grid = InlineGrid(client_app.app, nodes or config.stream.clients, config.flat(), run_id=1)
        self.weights = as_arrays(self.experiment.initial_weights())
        self.folder = Path(config.run.results_dir) / config.run.run_name / "clients"

    def send(self, kind: str, client: int, round_number: int) -> Message:
        content = wire.instruction(wire.array_record(self.weights), {}, client, round_number)
        message = Message(content, dst_node_id=client + 2, message_type=kind)
        (reply,) = self.grid.send_and_receive([message])
        return reply

    def train(self, client: int, round_number: int) -> wire.Reply:
        return wire.read_reply(self.send(MessageType.TRAIN, client, round_number), client, wire.shapes_of(self.weights))

    def evaluate(self, client: int, round_number: int) -> wire.Reply:
        return wire.read_reply(self.send(MessageType.EVALUATE, client, round_number), client, None)

    def store(self, client: int) -> ClientStore:
        """Open a client's stored states."""
        unmet = torch.zeros(self.experiment.num_classes, dtype=torch.bool)
        empty = ClientState(unmet, Samples.none(), run="", client=client)  # messages here name no run
        return ClientStore(self.folder / f"client-{client:03d}", empty)

    def state(self, client: int, round_number: int) -> Path:
        return self.folder / f"client-{client:03d}" / f"state-{round_number:06d}.npz"
