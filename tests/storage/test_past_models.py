"""Past models of a run: which are kept, how, and that nothing is lost."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.errors import StateError
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.past_models import PastModel, thinned

HOUR, DAY = 3600, 86400
AMPLE = 10**12
MIDNIGHT = 1_800_000_000 // (7 * DAY) * 7 * DAY  # the beginning of a week, as weeks are counted here


def at(times: Iterable[float], size: int = 1) -> list[PastModel]:
    return [PastModel(number, MIDNIGHT + when, size) for number, when in enumerate(times, 1)]


def kept(times: Iterable[float], most: int = AMPLE, size: int = 1) -> list[int]:
    return sorted(thinned(at(times, size), most))


@pytest.mark.parametrize(
    ("times", "rounds"),
    [
        ([0, 1, 2], [1, 2, 3]),
        (range(12), [*range(3, 13)]),  # all of one hour
        ([0, 10, HOUR, HOUR + 10, *range(2 * HOUR, 2 * HOUR + 10)], [2, 4, *range(5, 15)]),
        ([0, HOUR, 5 * HOUR, *range(2 * DAY, 2 * DAY + 10)], [3, *range(4, 14)]),  # a day that is over
        ([0, DAY, 3 * DAY, 8 * DAY, *range(60 * DAY, 60 * DAY + 10)], [3, 4, *range(5, 15)]),  # weeks
    ],
    ids=["few", "last ten", "hours", "days", "weeks"],
)
def test_the_older_the_fewer(times: Iterable[float], rounds: list[int]) -> None:
    assert kept(times) == rounds


def test_a_year_of_hourly_rounds() -> None:
    rounds = kept(range(0, 365 * DAY, HOUR))
    ages = [(365 * DAY - HOUR) - (number - 1) * HOUR for number in rounds]
    assert sum(age <= DAY for age in ages) == 25
    assert sum(DAY < age <= 30 * DAY for age in ages) in (29, 30)
    assert sum(age > 30 * DAY for age in ages) in (47, 48, 49)


def test_a_clock_that_was_ahead_for_a_round_thins_nothing_else() -> None:
    hourly = [HOUR * number for number in range(14 * 24)]
    ahead = [when + 5 * 365 * DAY * (number == 100) for number, when in enumerate(hourly)]
    assert set(kept(hourly)) - {101} <= set(kept(ahead))


def test_the_newest_are_kept_within_the_bound() -> None:
    assert kept(range(5), most=35, size=10) == [3, 4, 5]
    assert kept(range(5), most=9, size=10) == [] == kept([])


@given(st.lists(st.floats(0, 90 * DAY), min_size=1, max_size=60).map(sorted))
def test_what_is_thinned_as_it_grows_is_what_is_thinned_at_once(times: list[float]) -> None:
    models = at(times)
    left: list[PastModel] = []
    for model in models:
        left.append(model)
        rounds = thinned(left, AMPLE)
        left = [each for each in left if each.round in rounds]
        assert thinned(left, AMPLE) == rounds and model.round in rounds
    assert {each.round for each in left} == thinned(models, AMPLE)


def made(number: int) -> Checkpoint:
    return Checkpoint(number, "1", {"w": np.full(3, float(number))})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_a_checkpoint_gets_a_second_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "server")
    checkpoints.keep_past(1)
    for number in range(1, 13):
        checkpoints.save(made(number))
    past = checkpoints.folder / "past"
    assert names(past) == [f"checkpoint-{number:06d}.npz" for number in range(3, 13)]
    assert (past / "checkpoint-000012.npz").samefile(checkpoints.folder / "checkpoint-000012.npz")
    assert checkpoints.of_round(5).weights["w"].tolist() == [5, 5, 5]
    with pytest.raises(StateError, match=r"checkpoint-000002\.npz: is not there"):
        checkpoints.of_round(2)


def test_a_copy_does_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    checkpoints = Checkpoints(tmp_path / "run" / "server")
    checkpoints.keep_past(1)
    for number in (1, 2):
        checkpoints.save(made(number))
    assert names(checkpoints.folder / "past") == ["checkpoint-000001.npz", "checkpoint-000002.npz"]
    written = [path.stat().st_mtime for path in sorted(checkpoints.folder.glob("**/checkpoint-000002.npz"))]
    assert written[0] == written[1] and checkpoints.of_round(1).round == 1


def test_what_a_killed_process_did_not_come_to_is_made_up_for(tmp_path: Path) -> None:
    """It ended between checkpoint and link of round 2; a later one resumes after round 2, and another after round 1."""
    folder = tmp_path / "run" / "server"
    first = Checkpoints(folder)
    first.keep_past(1)
    first.save(made(1))
    Checkpoints(folder).save(made(2))
    (folder / "past" / "checkpoint-000002.npz.partial").write_bytes(b"half")
    first.save(made(3))
    assert names(folder / "past") == [f"checkpoint-{number:06d}.npz" for number in (1, 2, 3)]
    (folder / "checkpoint-000003.npz").unlink()
    first.save(Checkpoint(2, "1", {"w": np.zeros(3)}))
    assert names(folder / "past") == [f"checkpoint-{number:06d}.npz" for number in (1, 2)]
    assert first.of_round(2).weights["w"].tolist() == [0, 0, 0]


def test_an_encrypted_one_opens_under_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(encryption.VARIABLE, "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
    checkpoints = Checkpoints(tmp_path / "run" / "server")
    checkpoints.keep_past(1)
    checkpoints.save(made(1))
    assert b"weights" not in (checkpoints.folder / "past" / "checkpoint-000001.npz").read_bytes()
    newest = checkpoints.newest()
    assert newest is not None and newest.round == checkpoints.of_round(1).round == 1
