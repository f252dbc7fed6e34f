"""The client of experience replay: a reservoir of past samples, trained on beside the chunk.

The smallest honest baseline, and the example that ``docs/add-a-method.md`` walks through.
"""

import torch

from clients.base import ClientRound, ContinualClient
from fedkace_flwr.samples import Samples
from fedkace_flwr.training.model import ResNet18


class ReplayClient(ContinualClient):
    """Plain cross-entropy over all classes met, on chunk and buffer alike; a uniform buffer (Vitter, 1985)."""

    def maintain(self, net: ResNet18, now: ClientRound) -> Samples:
        """Every sample met so far is in the buffer with the same probability."""
        buffer, chunk = now.state.buffer, now.chunk
        met = int(now.state.extra["met"]) if "met" in now.state.extra else 0
        slots = list(range(len(buffer)))
        generator, capacity = self.generator("reservoir", now.number), self.config.buffer.capacity
        for index in range(len(chunk)):
            met += 1
            if len(slots) < capacity:
                slots.append(len(buffer) + index)
            elif (place := int(torch.randint(met, (), generator=generator))) < capacity:
                slots[place] = len(buffer) + index
        self.extra = {"met": torch.tensor(met)}
        return buffer.followed_by(chunk).take(torch.tensor(sorted(slots), dtype=torch.int64))
