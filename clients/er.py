"""The client of experience replay: trains on the chunk and on a reservoir of past samples.

The simplest baseline with a buffer, and the example of ``docs/add-a-method.md``.
"""

import torch

from clients.base import ClientRound, ClientRule, Kept, Training


class ReplayClient(ClientRule):
    """Plain cross-entropy over all classes seen; a uniform sample of the stream as buffer (Vitter, 1985)."""

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Keep every sample of the stream so far with the same probability (reservoir sampling)."""
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
        kept = buffer.followed_by(chunk).take(torch.tensor(sorted(slots), dtype=torch.int64))
        return Kept(kept, {"met": torch.tensor(met)})
