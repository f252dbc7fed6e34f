"""When the next round begins, where data arrives in inboxes: keys ``round-interval`` and ``round-samples``.

Devices are asked how many labelled samples wait, which costs a small message and no model, unless their replies of the
last round say that there are enough. Samples that no client could train on in that round, such as a single one, do not
count until there are more, and those of a device whose training failed do not for a while. Under secure aggregation, samples must wait at three devices. Where classes are open, files
of a class without a number do not count either, but its name starts a round, after which it has one. A round that had
begun when the server was killed waits for nothing.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.class_names import ClassNames
from fedkace_flwr.rounds.exchange import exchange
from fedkace_flwr.rounds.members import Members
from fedkace_flwr.sections import SMALLEST_SUM

logger = logging.getLogger(__name__)

_LEAST_PAUSE, _LONGEST_PAUSE = 10.0, 60.0  # seconds between two questions without an interval; doubles in between
_LOOK = 1.0  # seconds between two looks for orders
_ANSWER = 60.0  # seconds to answer a question
# Seconds for which a device whose training failed starts no round; they double with each failure in a row.
_FIRST_REST, _LONGEST_REST = 10.0, 3600.0


class Pace:
    """Waits for the time of the next round.

    Parameters
    ----------
    config : Config
        The configuration.
    members : Members
        Who is asked.
    class_names : ClassNames
        The classes so far; takes the names that devices bring.
    orders : Orders, optional
        Ends the wait.
    looked : callable, optional
        Receives how many samples wait at each client that was asked.
    """

    def __init__(
        self,
        config: Config,
        members: Members,
        class_names: ClassNames,
        orders: Orders | None = None,
        looked: Callable[[Mapping[int, int]], None] = lambda waiting: None,
    ) -> None:
        self._arrives = config.data.arrives
        self._interval, self._samples = config.run.round_interval, config.run.round_samples
        self._most = config.data.inbox_bound
        self._fewest = SMALLEST_SUM if config.privacy.secagg and self._samples else 0
        self._members, self._class_names, self._orders, self._looked = members, class_names, orders, looked
        self._begun = float("-inf")
        self._waiting: Mapping[int, int] = {}
        self._left: Mapping[int, int] = {}
        self._rests: dict[int, tuple[float, float]] = {}  # of each client that failed: until when, and seconds

    def told(self, waiting: Mapping[int, int], unfit: Mapping[int, int], failed: Collection[int]) -> None:
        """Take note of a round: how many samples wait at clients, on how many some could not train, and who failed to."""
        self._left = unfit
        seconds = {client: min(2 * self._rests[client][1], _LONGEST_REST) for client in self._rests}
        rests = {client: seconds.get(client, _FIRST_REST) for client in failed}
        self._rests = {client: (time.monotonic() + rest, rest) for client, rest in rests.items()}
        self._note(waiting)

    def wait(self, grid: Grid, number: int) -> bool:
        """Wait until a round is due, or a rollback is ordered; False if the run was ordered to stop."""
        pause = max(self._interval, _LEAST_PAUSE)
        if self._arrives and not (self._orders and self._orders.must_finish(number)):
            self._sleep(self._begun + self._interval)
            while not self._is_ordered and not self._enough(grid):
                self._sleep(time.monotonic() + pause)
                pause = pause if self._interval else min(2 * pause, _LONGEST_PAUSE)
        self._begun = time.monotonic()
        return not self.is_stopped

    def waits_for(self) -> str:
        """Say what the next round waits for."""
        left = self._begun + self._interval - time.monotonic()
        if self.is_stopped:
            return "nothing: the run was ordered to stop"
        if self._arrives and left > 0:
            return f"{datetime.now(UTC) + timedelta(seconds=left):%H:%M:%S} UTC, when the next round may begin"
        arrived = sum(self._ready().values())
        return f"samples: {arrived} of {self._samples} have arrived" if self._arrives else "the next round"

    def _enough(self, grid: Grid) -> bool:
        if self._is_due():
            return True
        nodes = self._members.welcome(grid)
        self._note(self._asked(grid, nodes) if nodes else {})
        self._looked(self._waiting)
        return self._is_due() or self._class_names.are_due

    def _note(self, waiting: Mapping[int, int]) -> None:
        """Take note of what waits now; of what was left, no more than that can still be there."""
        self._waiting = waiting
        self._left = {client: min(count, waiting.get(client, count)) for client, count in self._left.items()}

    def _is_due(self) -> bool:
        ready = self._ready()
        room = sum(self._most - self._left.get(client, 0) for client in ready)
        fit = sum(count > 0 for count in ready.values())
        return sum(ready.values()) >= min(self._samples, room or self._samples) and fit >= self._fewest

    def _ready(self) -> dict[int, int]:
        """How many samples count now, by client."""
        now, rested = time.monotonic(), (float("-inf"), 0.0)
        return {
            client: max(0, count - self._left.get(client, 0))
            for client, count in self._waiting.items()
            if self._rests.get(client, rested)[0] <= now
        }

    def _asked(self, grid: Grid, nodes: Mapping[int, int]) -> dict[int, int]:
        def question(client: int, node: int) -> Message:
            told = ConfigRecord({wire.CLIENT: client, wire.MOST: self._most, **self._class_names.told()})
            content = RecordDict({wire.CONFIG: told})
            kind = f"{MessageType.QUERY}.{wire.WAITING}"
            return Message(content, dst_node_id=node, message_type=kind, ttl=_ANSWER)

        found = exchange(grid, {client: question(client, node) for client, node in nodes.items()}, _ANSWER)
        answers = {}
        for client, reply in found.replies.items():
            told = (
                ConfigRecord() if reply.has_error() else reply.content.config_records.get(wire.CONFIG, ConfigRecord())
            )
            count = told.get(wire.WAITING)
            if type(count) is int and count >= 0:
                answers[client] = count
                self._class_names.take(client, reply.content)
            else:
                cause = wire.root_cause(reply.error.reason) if reply.has_error() else f"says {wire.shown(count)}"
                logger.warning("client %d cannot say how many samples wait: %s", client, cause)
        return answers

    def _sleep(self, end: float) -> None:
        """Sleep until a time, or an order."""
        while (left := end - time.monotonic()) > 0 and not self._is_ordered:
            time.sleep(min(left, _LOOK))

    @property
    def _is_ordered(self) -> bool:
        """Whether an order ends the wait."""
        return self.is_stopped or (self._orders is not None and self._orders.rollback is not None)

    @property
    def is_stopped(self) -> bool:
        """Whether the run was ordered to stop."""
        return self._orders is not None and self._orders.stopped
