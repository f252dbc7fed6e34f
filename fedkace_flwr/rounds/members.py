"""Who takes part in a run: the seats, which SuperNode has each, and who is away.

A seat is a client number. Where nodes authenticate themselves with keys, Flower's id of a node belongs to its key: each
node gets a seat when it is first seen, and keeps it for the whole run, and what it says of itself does not count.
Elsewhere the nodes name their numbers (:mod:`fedkace_flwr.rounds.directory`).

A client that cannot be reached for ``away-after`` seconds is away: it is warned of once, and neither asked nor counted
in the quorum until it is back. In simulations the key ``away`` says who is away when.
"""

import itertools
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.messaging import wire
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.rounds.directory import ClientDirectory
from fedkace_flwr.rounds.exchange import crosses_network
from fedkace_flwr.storage.files import read_text
from fedkace_flwr.storage.names import printable

logger = logging.getLogger(__name__)

NODES = "FEDKACE_NODES"
"""Variable of the environment with the path of the list of registered nodes, on a federation whose nodes have keys."""

_PATIENCE = 15.0  # seconds that a phase waits for answers of new SuperNodes
_PAUSE = 0.5
_LARGEST_LIST = 2**22  # bytes
_MOST_SEATS = 100_000
_NOBODY = 0  # no id of Flower's


@dataclass(frozen=True)
class Registered:
    """A node as it was registered: its name, and its seat if one was named."""

    name: str
    seat: int | None = None


@dataclass
class Seat:
    """A client number.

    Attributes
    ----------
    node : int
        Flower's id of its SuperNode; 0 if none has come yet, and if nodes name their own numbers.
    joined : int
        First round in which the client takes part; 0 if none has begun.
    seen : float
        When it could last be reached, or was first missed; monotonic seconds.
    last : str
        The same for people; empty if it never was.
    away : bool
        Whether it counts as away.
    note : str
        What is odd about the node; empty if nothing is.
    reached : bool
        Whether it could be reached at the last look. Between two rounds an hour may pass in which nobody looks.
    """

    node: int
    joined: int
    seen: float
    last: str = ""
    away: bool = False
    note: str = ""
    reached: bool = False


class Members:
    """The seats of a run.

    Parameters
    ----------
    config : Config
        The configuration.
    orders : Orders, optional
        Names the seats that are removed.
    """

    def __init__(self, config: Config, orders: Orders | None = None) -> None:
        self._config = config
        self._orders = orders
        self._list = os.environ.get(NODES, "")
        self._directory = ClientDirectory(
            config.stream.clients, config.run.join_deadline, alone=config.data.arrives, quiet=self.keyed
        )
        now = time.monotonic()
        self._seats = {client: Seat(_NOBODY, 0, now) for client in range(config.stream.clients)}
        self._round = 1
        self._named: set[str] = set()

    @property
    def keyed(self) -> bool:
        """Whether seats belong to the nodes' keys."""
        return bool(self._list)

    @property
    def count(self) -> int:
        """Number of seats so far, those that were removed included; clients are numbered below it."""
        return max(self._seats) + 1

    @property
    def present(self) -> tuple[int, ...]:
        """The clients that take part now: seats that are neither removed nor away, in ascending order."""
        out = self._removed()
        if not self._config.data.arrives:
            out |= set(range(self._config.stream.clients)).difference(self._config.stream.members(self._round))
        return tuple(number for number, seat in sorted(self._seats.items()) if number not in out and not seat.away)

    @property
    def away(self) -> tuple[int, ...]:
        """The clients that are away now, in ascending order."""
        return tuple(sorted(set(self._seats).difference(self.present, self._removed())))

    def open(self, number: int, grid: Grid) -> None:
        """Begin a round, in which new nodes take part."""
        self._round = number
        self.welcome(grid)
        for seat in self._seats.values():
            seat.joined = seat.joined or number

    def welcome(self, grid: Grid) -> dict[int, int]:
        """Give seats to new nodes; node of each client that takes part and can be reached."""
        self._admit(self._directory.look(grid, 0.0))
        return self.nodes(grid)

    def nodes(self, grid: Grid, patience: float = _PATIENCE) -> dict[int, int]:
        """Node of each client that takes part and can be reached.

        Without keys, the call waits up to ``patience`` seconds for the answers of new nodes.
        """
        reachable = self._hosts(grid, patience)
        now, removed = time.monotonic(), self._removed()
        for number, seat in self._seats.items():
            if number in removed:
                continue
            if number in reachable:
                if seat.away:
                    logger.info("%s is back", self._called(number))
                seat.seen, seat.reached, seat.away = now, True, False
                seat.last = datetime.now(UTC).isoformat(timespec="seconds")
            elif seat.reached:
                seat.seen, seat.reached = now, False
            elif not seat.away and now - seat.seen > self._config.run.away_after:
                seat.away = True
                logger.warning(
                    "%s has been away for more than away-after = %g seconds; it is not waited for until it is back",
                    self._called(number),
                    self._config.run.away_after,
                )
        present = set(self.present)
        return {client: node for client, node in reachable.items() if client in present}

    def wait(self, grid: Grid) -> dict[int, int]:
        """Wait until every client that takes part can be reached.

        Raises
        ------
        RunError
            No SuperNode joined in time, or none could name its partition.
        """
        if crosses_network(grid) and not self.keyed:
            logger.warning(
                "SuperNodes name their client numbers themselves; where they have keys, set %s in the environment of "
                "the SuperExec, as deploy/superexec.sh does",
                NODES,
            )
        nodes = self.gather(grid, 1.0)
        wanted, deadline = len(self.present), self._config.run.join_deadline
        if not nodes:
            if reasons := self._directory.reasons():
                raise RunError(
                    f"none of {len(reasons)} SuperNodes could name its partition within join-deadline = "
                    f"{deadline:g} seconds: {reasons[0]}"
                )
            raise RunError(f"no SuperNode joined within join-deadline = {deadline:g} seconds")
        hosts = len(set(nodes.values()))
        if len(nodes) < wanted:
            logger.warning("%d of %d clients can be reached; starting without the others", len(nodes), wanted)
        elif hosts < wanted:
            logger.info("%d SuperNodes host %d clients between them", hosts, wanted)
        return nodes

    def gather(self, grid: Grid, share: float) -> dict[int, int]:
        """Wait until a share of the clients can be reached, the join deadline or an order to stop; node of each client."""
        deadline = self._config.run.join_deadline
        begun = time.monotonic()
        self._admit(self._directory.look(grid, 0.0))
        nodes = self.nodes(grid, _PAUSE)
        while len(nodes) < share * len(self.present) and time.monotonic() - begun < deadline:
            if self._orders and self._orders.stopped:
                break
            time.sleep(min(_PAUSE, deadline))
            self._admit(self._directory.look(grid, 0.0))
            nodes = self.nodes(grid, _PAUSE)
        return nodes

    def state(self) -> list[dict[str, Any]]:
        """The seats as a JSON-ready record; where nodes name their numbers, nothing has to be kept."""
        now = time.monotonic()
        return [
            {"seat": number, "node": seat.node, "joined": seat.joined, "last": seat.last, "unseen": now - seat.seen}
            for number, seat in sorted(self._seats.items())
            if seat.node != _NOBODY
        ]

    def restore(self, record: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state` returned; who was away before is so until it is reached."""
        if not self.keyed:
            return
        now, after = time.monotonic(), self._config.run.away_after
        for each in record:
            unseen = float(each["unseen"])
            self._seats[int(each["seat"])] = Seat(
                int(each["node"]), int(each["joined"]), now - unseen, str(each["last"]), away=unseen > after
            )

    def table(self) -> list[dict[str, Any]]:
        """The seats for people, one entry each."""
        removed, present, registered = self._removed(), set(self.present), self._registered()
        return [
            {
                "seat": number,
                "name": self._name_of(seat, registered),
                "node": seat.node,
                "joined": seat.joined,
                "last": seat.last or None,
                "online": seat.reached and number not in removed,
                "status": "removed" if number in removed else "present" if number in present else "away",
                "note": seat.note,
            }
            for number, seat in sorted(self._seats.items())
        ]

    def _hosts(self, grid: Grid, patience: float) -> dict[int, int]:
        """Node of each seat that can be reached."""
        if not self.keyed:
            return self._directory.nodes(grid, patience)
        found, claims = self._directory.look(grid, 0.0), self._directory.partitions
        for number, seat in self._seats.items():
            partition, partitions = claims.get(seat.node, (number, 0))
            if partition != number:
                seat.note = f"claims {wire.PARTITION} = {partition} of {partitions}, which does not count"
                self._say_once(f"{self._called(number)} {seat.note}")
        return {number: seat.node for number, seat in self._seats.items() if seat.node in found}

    def _admit(self, found: Collection[int]) -> None:
        """Give a seat to each of these nodes that has none; where nodes name their numbers, there is nothing to give."""
        holders = {seat.node for seat in self._seats.values()}
        if not self.keyed or holders.issuperset(found):
            return
        registered = self._registered()
        order = {node: place for place, node in enumerate(registered)}
        for node in sorted(set(found) - holders, key=lambda node: (order.get(node, len(order)), node)):
            named = registered[node].seat if node in registered else None
            number = self._free(registered) if named is None else named
            holder = self._seats.get(number, Seat(_NOBODY, 0, 0.0))
            if not self._has_place(number):
                clients = self._config.stream.clients
                self._say_once(f"SuperNode {node} gets no seat: the data set's streams are those of {clients} clients")
            elif holder.node in found or number in self._removed():
                self._say_once(
                    f"SuperNode {node} gets no seat: {number}, named at its registration, is taken or removed"
                )
            else:
                self._seats[number] = Seat(node, holder.joined, time.monotonic())
                logger.info("SuperNode %d is %s", node, self._called(number))

    def _has_place(self, number: int) -> bool:
        return number < (_MOST_SEATS if self._config.data.arrives else self._config.stream.clients)

    def _free(self, registered: Mapping[int, Registered]) -> int:
        """The lowest number that no node has had and that none was named for."""
        taken = {each.seat for each in registered.values()} | self._removed()
        taken |= {number for number, seat in self._seats.items() if seat.node != _NOBODY}
        return next(number for number in itertools.count() if number not in taken)

    def _registered(self) -> dict[int, Registered]:
        try:
            text = read_text(Path(self._list), _LARGEST_LIST) if self._list else ""
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._say_once(f"{NODES} = {self._list}: cannot be read ({error}); nodes have no names")
            return {}
        return registered_nodes(text)

    def _name_of(self, seat: Seat, registered: Mapping[int, Registered]) -> str:
        return registered[seat.node].name if seat.node in registered else ""

    def _called(self, number: int) -> str:
        name = self._name_of(self._seats[number], self._registered())
        return f"client {number} ({printable(name)})" if name else f"client {number}"

    def _removed(self) -> frozenset[int]:
        return self._orders.removed() if self._orders else frozenset()

    def _say_once(self, text: str) -> None:
        if text not in self._named:
            self._named.add(text)
            logger.warning("%s", text)


def registered_nodes(text: str) -> dict[int, Registered]:
    """Read the list of registered nodes: lines of a node's id, its name and, optionally, its seat; others are skipped."""
    found: dict[int, Registered] = {}
    for line in text.splitlines():
        node, name, seat, *_ = [*line.split(), "", "", ""]
        if node.isdecimal() and name:
            found[int(node)] = Registered(name, int(seat) if seat.isdecimal() else None)
    return found
