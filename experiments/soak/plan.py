"""What happens in a simulated year, drawn before it begins."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from fedkace_flwr.seeding import seed_for

START_NODES = 3
START_CLASSES = 6
FEWEST_ROUNDS = 20
"""Rounds in which everything can happen once."""

WEEK = 5
"""Rounds for which labels are swapped."""

_LONGEST_DELAY = 8.0  # seconds; a round takes about ten, so that a kill hits any part of it


@dataclass(frozen=True)
class Kind:
    """A kind of event.

    Attributes
    ----------
    name : str
        Its name.
    per_year : int
        How often it happens in 200 rounds; in fewer, proportionally, and at least once.
    first, last : float
        The part of the year in which it happens.
    meaning : str
        For the schedule.
    """

    name: str
    per_year: int
    first: float
    last: float
    meaning: str


KINDS: tuple[Kind, ...] = (
    Kind("join", 1, 0.12, 0.16, "a new node is set up and started"),
    Kind("leave", 1, 0.05, 0.1, "a node is removed for good"),
    Kind("new-class", 2, 0.15, 0.5, "samples of a class arrive that nobody has named"),
    Kind("quiet", 1, 0.3, 0.55, "no sample arrives anywhere for a while: no model may travel"),
    Kind("absence", 3, 0.2, 0.5, "a node is stopped, and started again some rounds later"),
    Kind("kill-client", 4, 0.1, 0.9, "a client's process at work is killed"),
    Kind("kill-node", 3, 0.1, 0.85, "a node loses its power: SuperNode and all its processes"),
    Kind("kill-superlink", 1, 0.3, 0.7, "the SuperLink is killed, and starts again"),
    Kind("kill-superexec", 1, 0.3, 0.7, "the SuperExec and the ServerApp are killed"),
    Kind("kill-run", 1, 0.3, 0.7, "the service that keeps the run going is killed"),
    Kind("kill-serverapp", 1, 0.3, 0.7, "the ServerApp is killed"),
    Kind("kill-all", 1, 0.4, 0.7, "every process of the federation is killed at once"),
    Kind("restart-hub", 1, 0.3, 0.7, "SuperLink and SuperExec are stopped and started again"),
    Kind("upgrade", 1, 0.3, 0.7, "another version of the app is submitted"),
)
"""All kinds of events whose time is drawn.

From a quarter on, the number of nodes is the same. What restarts the hub leaves the last part of the year alone: then its
processes are at their oldest, and growth shows.
"""

BACK, SWAP, ROLLBACK = "back", "swap", "rollback"
"""A node returns; all nodes but one begin to label wrongly; they label rightly again, and the model is taken back."""

_FIRST_SWAP, _NEXT_SWAP = 0.6, 50  # part of the year, and rounds: detectors of a sudden change need some before it


@dataclass(frozen=True)
class Event:
    """Something that happens to the federation.

    Attributes
    ----------
    round : int
        It happens after this round.
    kind : str
        One of :data:`KINDS`, or :data:`BACK`, :data:`SWAP` or :data:`ROLLBACK`.
    node : int
        The node that it happens to, from 1; 0: to none in particular. In a swap, the one that labels rightly.
    delay : float
        Seconds after the round's record.
    """

    round: int
    kind: str
    node: int = 0
    delay: float = 0.0

    def __str__(self) -> str:
        """Return a line of the schedule."""
        place = f" node-{self.node}" if self.node else ""
        return f"after round {self.round:3d} + {self.delay:.1f} s: {self.kind}{place}"

    def record(self) -> dict[str, object]:
        """Return JSON-ready values."""
        return asdict(self)


def draw(rounds: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Event]:
    """Draw the events of a year of so many rounds, in their order.

    No two nodes are away at the same time. In a long year no two events follow the same round, but for a node's return.
    """
    chance = random.Random(seed_for(seed, "soak", "plan"))
    placed: dict[int, list[str]] = {number: [] for number in range(2, rounds - 1)}
    for number in range(int(_FIRST_SWAP * rounds), rounds - WEEK - 2, _NEXT_SWAP):
        placed[number].append(SWAP)
        placed[number + WEEK].append(ROLLBACK)
    for kind in sorted(kinds, key=lambda kind: kind.last - kind.first):  # the least free first
        for _ in range(max(1, round(kind.per_year * rounds / 200))):
            window = [number for number in placed if kind.first * rounds <= number <= kind.last * rounds] or [2]
            fewest = min(len(placed[number]) for number in window)
            placed[chance.choice([number for number in window if len(placed[number]) == fewest])].append(kind.name)
    return list(_with_nodes(placed, rounds, chance))


def _with_nodes(placed: dict[int, list[str]], rounds: int, chance: random.Random) -> Iterator[Event]:
    """Walk through the year and draw whom each event meets."""
    present, newest, away, back = list(range(1, START_NODES + 1)), START_NODES, 0, 0
    for number, name in [(number, name) for number, names in placed.items() for name in ["", *names]]:
        if away and number >= back:
            yield Event(number, BACK, away)
            away = 0
        if not name:
            continue
        delay = round(chance.uniform(0, _LONGEST_DELAY), 1)
        if name == "join":
            newest += 1  # no number is given again
            present.append(newest)
            yield Event(number, name, newest, delay)
        elif name == "leave":
            gone = chance.choice([node for node in present if node != away])
            present.remove(gone)
            yield Event(number, name, gone, delay)
        elif name == "absence":
            if away:
                yield Event(number, BACK, away)
            away = chance.choice(present)
            back = min(number + chance.randint(1, max(2, rounds // 25)), rounds - 2)
            yield Event(number, name, away, delay)
        elif name == SWAP:
            yield Event(number, name, max(present), delay)  # the newest, whose detector has seen least
        elif name in ("kill-client", "kill-node"):
            yield Event(number, name, chance.choice([node for node in present if node != away]), delay)
        else:
            yield Event(number, name, delay=delay)
