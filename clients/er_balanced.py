"""The client of experience replay from a class-balanced buffer."""

import torch

from clients.base import ClientRound, ClientRule, Kept, Training
from fedkace_flwr.algorithms.fedkace_buffer import Scores, select


class BalancedReplayClient(ClientRule):
    """Cross-entropy over all classes seen, on the chunk and on a buffer with equally many samples of each class."""

    def maintain(self, now: ClientRound, training: Training) -> Kept:
        """Give every class the same number of places, and draw its samples uniformly from those at hand.

        Places that a class cannot fill go to the other classes.
        """
        candidates = now.state.buffer.followed_by(now.chunk)
        nothing = torch.zeros(len(candidates), dtype=torch.float64)
        kept = select(
            Scores(nothing, nothing, nothing),
            candidates.labels,
            self.config.buffer.capacity,
            now.old,
            now.seen,
            self.generator("selection", now.number),
            leftover="fill",
            rule="random",
        )
        return Kept(candidates.take(kept))
