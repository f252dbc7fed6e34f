"""The course of a simulated year: samples arrive, rounds pass, and what was planned happens."""

import json
import random
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.living import remove, roll_back, stop
from fedkace_flwr.experiments.running.processes import staged_app
from fedkace_flwr.experiments.soak.federation import CLIENT, HUB, SERVERAPP, Federation
from fedkace_flwr.experiments.soak.ledger import Form, Ledger, Pixels
from fedkace_flwr.experiments.soak.measures import Measures
from fedkace_flwr.experiments.soak.plan import BACK, ROLLBACK, START_CLASSES, START_NODES, SWAP, Event, draw
from fedkace_flwr.experiments.soak.verdict import SETTLED, Week
from fedkace_flwr.seeding import seed_for

_LOOK = 1.0  # seconds between two looks at the federation
_STALL = 600.0  # seconds without a round, or with files that nobody learns, after which the year is given up
_CHUNK = (6, 10)  # samples of a node in a round
_CLASSES = 2  # of which they are
_WRONG = 30  # samples of a node, of all classes, in a round in which labels are wrong: they must do harm
_NOISE = 12  # of 255; makes each picture unique
_PICTURES = 5  # each chunk of this number arrives as pictures instead of an archive
_UNLABELLED = 3  # each chunk of this number arrives as pictures without labels
_NEVER = 0.25  # share of these that never get one
_LATE = (2, 4)  # rounds after which the others do; a chunk is there up to a round before its own
_AGE = 180.0  # seconds that a node keeps them; all labels come within a third of it, even if no round ends
_TESTS = 20  # of each class
_QUIET = 45.0  # seconds
_END = 120.0  # seconds in which a run must end that is told to

_CONFIG = {
    "dataset": "inbox",
    "image-size": 8,
    "inbox-bound": 400,
    "clients": START_NODES,
    "network": "cnn",
    "width": 8,
    "epochs": 3,
    "capacity": 40,
    "rounds": 0,
    "classes": "open",
    "max-classes": 10,
    "away-after": 30.0,
    "probe": 20.0,
    "deadline": 300.0,
    "unlabelled-age": _AGE,
    "gate": "hold",
    "gate-tolerance": 0.05,
}


class Cameras:
    """Unique labelled pictures, made from scanned digits.

    Parameters
    ----------
    seed : int
        The year's seed.
    """

    def __init__(self, seed: int) -> None:
        dataset = Experiment(Config.parse({"dataset": "digits"})).dataset
        self.names = dataset.class_names
        self._images, self._labels = dataset.images[:, 0], dataset.labels
        self._train = dataset.train_size
        self._seed = seed

    def chunk(self, node: int, number: int, classes: int) -> tuple[Pixels, list[str]]:
        """Return what a node sees for a round: pictures, uint8 (n, 8, 8), of two of the first classes; and their names."""
        chance = np.random.default_rng(seed_for(self._seed, "soak", "chunk", node, number))
        chosen = chance.choice(classes, _CLASSES, replace=False)
        return self._drawn(chance, chosen, int(chance.integers(*_CHUNK, endpoint=True)), number)

    def large_chunk(self, node: int, number: int, classes: int) -> tuple[Pixels, list[str]]:
        """Return many pictures of all of the first classes."""
        chance = np.random.default_rng(seed_for(self._seed, "soak", "large chunk", node, number))
        return self._drawn(chance, np.arange(classes), _WRONG, number)

    def of_class(self, node: int, label: int) -> tuple[Pixels, list[str]]:
        """Return pictures of one class alone."""
        chance = np.random.default_rng(seed_for(self._seed, "soak", "class", node, label))
        return self._drawn(chance, np.array([label]), max(_CHUNK), label)

    def _drawn(self, chance: np.random.Generator, classes: Any, count: int, number: int) -> tuple[Pixels, list[str]]:
        ids = chance.choice(np.flatnonzero(np.isin(self._labels[: self._train], classes)), count, replace=False)
        noise = chance.integers(-_NOISE, _NOISE, (count, *self._images.shape[1:]), endpoint=True)
        images = np.clip(self._images[ids].astype(np.int64) + noise, 0, 255).astype(np.uint8)
        return images, [self.names[label] for label in self._labels[ids]]

    def write_tests(self, folder: Path, label: int) -> None:
        """Write test pictures of a class, as one file."""
        ids = self._train + np.flatnonzero(self._labels[self._train :] == label)[:_TESTS]
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{label}.npz", images=self._images[ids], labels=np.array([self.names[label]] * len(ids)))


class Year:
    """A year.

    Parameters
    ----------
    rounds : int
        Its rounds.
    seed : int
        Its seed.
    folder : Path
        For the federation.
    say : callable
        Prints a line.

    Attributes
    ----------
    happened : list of (Event, float)
        What has happened, with its second.
    online : list of int
        Number of nodes that are meant to run, after each round.
    checks : list of (str, str, bool)
        What was looked at on the way, what was found, and whether it is right.
    weeks : list of Week
        In which nodes labelled wrongly.
    """

    def __init__(self, rounds: int, seed: int, folder: Path, say: Callable[[str], None]) -> None:
        self.rounds, self._seed, self._say = rounds, seed, say
        self.plan = draw(rounds, seed)
        self._tests, self._config = folder / "test", folder / "run.toml"
        self._heard = folder / "alarms"
        self.cameras = Cameras(seed)
        self._classes = START_CLASSES
        for label in range(self._classes):
            self.cameras.write_tests(self._tests, label)
        self.federation = Federation(folder, START_NODES, self._tests)
        self.ledger = Ledger(self.federation.folder)
        self.measures = Measures(self.federation)
        self.happened: list[tuple[Event, float]] = []
        self.online: list[int] = []
        self.checks: list[tuple[str, str, bool]] = []
        self.weeks: list[Week] = []
        self._nodes = [f"node-{number}" for number in range(1, START_NODES + 1)]
        self._gone: dict[str, int] = {}  # nodes that have left, each with the round
        self._fed = dict.fromkeys(self._nodes, 0)  # chunks that each node was given
        self._feeds = True
        # After which round a node learns the classes of pictures, and at which second at the latest.
        self._late: list[tuple[int, float, str, dict[str, str]]] = []
        self._honest = ""  # if any: all others label wrongly
        self._wrong: list[str] = []  # files, some with such labels, that are to be learned before they are forgotten
        # Since when nothing happens, after which round, what was spent until then, and by whom.
        self._still: tuple[float, int, float, list[str]] | None = None
        federation = self.federation
        self._deeds: dict[str, Callable[[str], object]] = {
            "join": self._join,
            "leave": self._leave,
            "absence": federation.stop,
            BACK: federation.start,
            SWAP: self._swap,
            ROLLBACK: self._rollback,
            "new-class": self._new_class,
            "quiet": self._quiet,
            "kill-client": lambda node: federation.kill([node], CLIENT),
            "kill-node": lambda node: federation.kill([node]),
            "kill-superlink": lambda _: federation.kill(["superlink"]),
            "kill-superexec": lambda _: federation.kill(["superexec"]),
            "kill-run": lambda _: federation.kill(["run"]),
            "kill-serverapp": lambda _: federation.kill(["superexec"], SERVERAPP),
            "kill-all": lambda _: federation.kill(federation.meant),
            "restart-hub": self._restart_hub,
            "upgrade": self._upgrade,
        }
        self._begun = time.monotonic()

    def live(self) -> None:
        """Run the whole year; the federation still runs when this returns.

        Raises
        ------
        RunError
            No round ends any more, or some files are never learned.
        """
        told = {**_CONFIG, "seed": self._seed, "class-names": ", ".join(self.cameras.names[:START_CLASSES])}
        heard = shlex.quote(str(self._heard))
        told["on-alarm"] = f"sh -c '{{ echo; cat; }} >> \"$0\"' {heard}"
        self._config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()))
        self._feed(0)
        self.federation.begin(self._config)
        planned, due = list(self.plan), list[tuple[float, Event]]()
        done, since = 0, time.monotonic()
        while done < self.rounds or due:
            self._look()
            now, recorded = time.monotonic(), self._recorded()
            if recorded > done:
                done, since = recorded, now
                self._after(done)
            while planned and planned[0].round <= done:
                event = planned.pop(0)
                due.append((now + event.delay, event))
            due = [(when, event) for when, event in due if when > now or not self._happen(event)]
            self._feed(done)
            self._label(done)
            if now - since > _STALL:
                raise RunError(f"no round has ended for {_STALL:g} seconds after round {done}")
            time.sleep(_LOOK)
        self._settle()
        self._stop()

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the rounds so far."""
        path = self.federation.run / "rounds.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def heard(self) -> list[dict[str, Any]]:
        """Return the alarms that came to the operator's command, as the record has them: without names."""
        alarms: list[dict[str, Any]] = []
        for line in self._heard.read_text().splitlines() if self._heard.exists() else ():
            with suppress(ValueError):  # the command was killed, too
                alarms += json.loads(line)["alarms"]
        return [{name: value for name, value in alarm.items() if name != "name"} for alarm in alarms]

    def dropped(self) -> int:
        """Return how many pictures without labels were dropped, by the hub's count."""
        members = json.loads((self.federation.run / "members.json").read_text())
        return sum(each.get("dropped") or 0 for each in members["members"])

    def _recorded(self) -> int:
        path = self.federation.run / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _look(self) -> None:
        self.federation.tend()
        self.measures.look()

    def _after(self, number: int) -> None:
        for node in self._nodes:
            self.ledger.count(node)
            self.ledger.recall(node)
        self.measures.after(number)
        nodes = sum(name.startswith("node-") for name in self.federation.meant)
        self.online += [nodes] * (number - len(self.online))
        record = self.records()[-1]
        accuracy = record["accuracy"]
        seen = "-" if accuracy is None else f"{100 * accuracy:.0f} %"
        self._say(f"{self._clock():6.0f} s: round {number}, {nodes} nodes, accuracy {seen}")

    def _feed(self, done: int) -> None:
        """Give each node the samples of the next round as soon as it has taken those of the last."""
        for node in self._nodes if self._feeds else ():
            given = self._fed[node]
            wants = given <= done or (given == done + 1 and not self.ledger.waiting(node))
            if wants and given < self.rounds:
                number = self._fed[node] = given + 1
                self._give(node, number, done)

    def _give(self, node: str, number: int, done: int) -> None:
        """Give a node a chunk."""
        seat = int(node.removeprefix("node-"))
        drawn = self.cameras.large_chunk if self._honest else self.cameras.chunk
        images, names = drawn(seat, number, self._classes)
        if self._honest or (number + seat) % _UNLABELLED:
            form: Form = "archive" if number % _PICTURES else "pictures"
            self.ledger.drop(node, images, [self._said(node, name) for name in names], form)
            return
        chance = random.Random(seed_for(self._seed, "soak", "late", seat, number))
        names = ["" if chance.random() < _NEVER else name for name in names]
        files = self.ledger.drop(node, images, names, "unlabelled")
        classes = {file: name for file, name in zip(files, names, strict=True) if name}
        if classes:
            self._late.append((done + chance.randint(*_LATE), time.monotonic() + _AGE / 3, node, classes))

    def _label(self, done: int) -> None:
        """Tell nodes what pictures show whose time has come: half of them by lists."""
        for late in list(self._late):
            after, at_latest, node, classes = late
            if after <= done or at_latest <= time.monotonic():
                self._late.remove(late)
                told = {file: self._said(node, name) for file, name in classes.items()}
                self.ledger.label(told, as_list=after % 2 == 0)

    def _said(self, node: str, name: str) -> str:
        """What a node says that a picture of a class is."""
        names = self.cameras.names[: self._classes]
        return name if self._honest in ("", node) else names[(names.index(name) + 1) % len(names)]

    def _settle(self) -> None:
        """Let the nodes learn what is left, without further disturbance."""
        since = time.monotonic()
        while any(self.ledger.open(node) for node in self._nodes):
            self._look()
            self._label(self._recorded())
            for node in self._nodes:
                self.ledger.count(node)
            if time.monotonic() - since > _STALL:
                left = {node: len(self.ledger.open(node)) for node in self._nodes}
                raise RunError(f"files that are never learned, by node: {left}")
            time.sleep(_LOOK)
        for node in self._nodes:
            self.ledger.recall(node)
        self.ledger.compare()
        met = [memory.classes for node, memory in self.ledger.memories.items() if node in self._nodes]
        told = f"{self._classes} were given, nodes have met {min(met)} to {max(met)}"
        # In a short year, the round in which a node met a class may have been held, and no other has brought it.
        self.checks.append(("classes", told, (min(met) if self.rounds >= SETTLED else max(met)) > START_CLASSES))
        environment = json.loads((self.federation.run / "environment.json").read_text())
        upgrade = next(event.round for event, _ in self.happened if event.kind == "upgrade")
        versions = [each["fedkace_flwr"] for each in environment["resumptions"] if each["round"] > upgrade]
        told = f"the run goes on with {', '.join(dict.fromkeys(versions))}"
        self.checks.append(("upgrade", told, bool(versions) and environment["fedkace_flwr"] not in versions))

    def _stop(self) -> None:
        """Stop the run as an operator does."""
        stop(self.federation.run)
        since, summary = time.monotonic(), self.federation.run / "summary.json"
        while not summary.exists() and time.monotonic() - since < _END:
            time.sleep(_LOOK)
        for node in (*self._nodes, *self._gone):  # the last evaluation may have dropped pictures
            self.ledger.count(node)
        self.checks.append(("fedkace stop", "the run has ended" if summary.exists() else "no end", summary.exists()))

    def _clock(self) -> float:
        return time.monotonic() - self._begun

    def _happen(self, event: Event) -> bool:
        """Let an event happen; False if it must wait for its moment."""
        if self._deeds[event.kind](f"node-{event.node}" if event.node else "") is False:
            return False
        self.happened.append((event, self._clock()))
        self._say(f"{self._clock():6.0f} s: {event.kind}{f' node-{event.node}' if event.node else ''}")
        return True

    def _join(self, node: str) -> None:
        added = self.federation.add()
        self.checks.append(("a node joins", added, added == node))
        self._nodes.append(node)
        self._fed[node] = self._recorded()

    def _leave(self, node: str) -> bool:
        """Remove a node that has learned what it was given; nobody gives it more."""
        if node in self._nodes:
            self._nodes.remove(node)
            self._gone[node] = self._recorded()
        self.ledger.count(node)
        if self.ledger.open(node):
            return False
        self.ledger.recall(node)
        remove(self.federation.run, int(node.removeprefix("node-")) - 1)
        self.federation.stop(node)
        return True

    def _new_class(self, _: str) -> None:
        """Two nodes are given pictures of a class that has no number yet: one in a folder, the other in an archive."""
        label, self._classes = self._classes, self._classes + 1
        self.cameras.write_tests(self._tests, label)
        for place, node in enumerate(self._nodes[:2]):
            images, names = self.cameras.of_class(int(node.removeprefix("node-")), label)
            self.ledger.drop(node, images, names, "archive" if place else "pictures")

    def _swap(self, honest: str) -> None:
        """Let all other nodes label wrongly from now on."""
        self._honest = honest
        self.weeks.append(Week(self._recorded(), [node for node in self._nodes if node != honest]))

    def _rollback(self, _: str) -> bool:
        """Let them label rightly; when all that is wrong has been learned, order the model of before."""
        for node in self._nodes:
            self.ledger.count(node)
        labelled = [
            name for node in self._nodes for name in self.ledger.open(node) if self.ledger.files[name].label == "given"
        ]
        self._wrong = labelled if self._honest else [name for name in self._wrong if name in labelled]
        self._honest = ""
        if self._wrong:
            return False
        roll_back(self.federation.run, self.weeks[-1].before)
        return True

    def _quiet(self, _: str) -> bool:
        """Give nothing to anyone until all is learned, and then for a while, in which no round may take place."""
        self._feeds = False
        now, recorded = time.monotonic(), self._recorded()
        busy = [node for node in self._nodes if node in self.federation.meant]
        for node in busy:
            self.ledger.count(node)
        learning = any(self.ledger.open(node) for node in busy) or recorded < self.ledger.last_round
        if learning or (self._still and self._still[3] != busy):  # a node that was away may be back
            self._still = None
            return False
        self._still = self._still or (now, recorded, self.measures.seconds(busy), busy)
        since, before, spent = self._still[:3]
        if now - since < _QUIET and recorded == before:
            return False
        an_hour = 3600 * (self.measures.seconds(busy) - spent) / len(busy) / max(1.0, now - since)
        told = f"{recorded - before} rounds; a node spends {an_hour:.0f} CPU seconds an hour"
        self.checks.append(("a day of nothing", told, recorded == before))
        self._feeds, self._still = True, None
        return True

    def _restart_hub(self, _: str) -> None:
        self.federation.stop(*HUB)
        self.federation.start(*HUB)

    def _upgrade(self, _: str) -> None:
        """Submit a copy of the app that calls itself another version."""
        new = staged_app(self.federation.root / "app-next")
        for path in (new / "pyproject.toml", new / "fedkace_flwr" / "__init__.py"):
            path.write_text(
                path.read_text().replace('version = "', 'version = "9').replace('version__ = "', 'version__ = "9')
            )
        self.federation.renew(new, self._config)
