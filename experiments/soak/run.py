"""The command ``soak``."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiments.soak import verdict
from fedkace_flwr.experiments.soak.plan import FEWEST_ROUNDS, draw
from fedkace_flwr.experiments.soak.year import Year
from fedkace_flwr.storage.targets import claim

_HOLDS = "a simulated year"


def soak(console: Console, *, rounds: int, seed: int, output: Path, only_plan: bool = False) -> bool:
    """Let a federation live through a year, print what came of it, and write ``soak.json`` and ``year.png``.

    Parameters
    ----------
    console : Console
        Where to print.
    rounds : int
        Rounds of the year.
    seed : int
        Seed of all that happens.
    output : Path
        The folder to write; the federation is in ``federation/`` there.
    only_plan : bool
        Whether only to print what would happen.

    Returns
    -------
    bool
        Whether all is as it must be.

    Raises
    ------
    ConfigError
        There are too few rounds, the folder holds something else, or this is no checkout.
    RunError
        The federation cannot be started.
    """
    if rounds < FEWEST_ROUNDS:
        raise ConfigError(f"--rounds {rounds}: must be at least {FEWEST_ROUNDS}, so that everything can happen once")
    say = _saying(console)
    for event in draw(rounds, seed):
        say(str(event))
    if only_plan:
        return True
    claim(output, _HOLDS)
    place = output.resolve() / "year"
    if place.exists():
        raise ConfigError(
            f"--output {output}: holds the federation of an earlier year; remove it, or name another folder"
        )
    place.mkdir()
    begun = time.monotonic()
    year, ended = Year(rounds, seed, place, say), []
    try:
        year.live()
    except (RunError, KeyboardInterrupt) as error:
        ended.append(verdict.Line("the year ended early", str(error) or "interrupted", False))
        say(year.federation.last_words())
    finally:
        year.federation.end()
    happened, records = [event for event, _ in year.happened], year.records()
    members = year.measures.members
    lines = [
        *ended,
        *verdict.course(rounds, records, year.plan, happened),
        *(verdict.Line(*check) for check in year.checks),
        *verdict.learning(year.ledger, year.dropped()),
        *verdict.watching(records, year.weeks, year.heard()),
        *verdict.growth(members),
        *verdict.costs(members, records, time.monotonic() - begun),
    ]
    console.print(verdict.table_of(lines))
    picture = verdict.draw(records, year.online, happened, members, year.weeks)
    told = {
        "seed": seed,
        "plan": [event.record() for event in year.plan],
        "happened": [event.record() | {"second": second} for event, second in year.happened],
        "online": year.online,
        "members": year.measures.record(),
    }
    verdict.write(output, lines, told, records, picture)
    say(f"written: {output / 'soak.json'}, {output / 'year.png'}")
    return all(line.ok is not False for line in lines)


def _saying(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
