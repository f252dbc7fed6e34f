"""The clients of experience replay, the simplest baselines with a buffer: a reservoir, and a class-balanced buffer."""

import torch

from fedkace_flwr.algorithms.class_balance import class_balanced
from fedkace_flwr.clients.base import ClientRound, ClientRule, Kept, Training
from fedkace_flwr.registry import Method


class ReplayClient(ClientRule):
    """Plain cross-entropy over all classes seen; a uniform sample of the stream as buffer (Vitter, 1985)."""

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Keep every sample of the stream so far with the same probability (reservoir sampling)."""
        buffer, chunk = now.state.buffer, now.chunk
        met = int(now.state.extra["met"]) if "met" in now.state.extra else 0
        met = max(met, len(buffer))  # a buffer may be an earlier run's
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


class BalancedReplayClient(ClientRule):
    """Cross-entropy over all classes seen, on the chunk and on a buffer with equally many samples of each class."""

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Give every class the same number of places, and draw its samples uniformly from those at hand.

        Places that a class cannot fill go to the other classes.
        """
        candidates = now.state.buffer.followed_by(now.chunk)
        generator = self.generator("selection", now.number)
        return Kept(candidates.take(class_balanced(candidates.labels, self.config.buffer.capacity, generator)))


METHOD = Method(ReplayClient, "ER", is_mean=True)
BALANCED = Method(BalancedReplayClient, "balanced ER", is_mean=True)
