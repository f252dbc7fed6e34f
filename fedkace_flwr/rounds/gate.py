"""The gate: whether a new global model replaces the accepted one, and which rounds are undone.

A round is undone if its candidate was held, or if a rollback has gone back before it. For what is remembered it has not
been: devices take back buffer, classes met and local model, so that wrong labels of such a round neither judge later
candidates nor are replayed. Rounds are kept as spans of a first and a last one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedkace_flwr.errors import MessageError
from fedkace_flwr.messaging import wire
from fedkace_flwr.messaging.wire import Reply
from fedkace_flwr.sections import RunConfig

Span = tuple[int, int]

_MOST_SPANS = 100
"""The latest, which are remembered; no buffer holds samples of more."""


class Gate:
    """Decides on candidates, and remembers the rounds that are undone.

    Parameters
    ----------
    settings : RunConfig
        The run's keys.
    """

    def __init__(self, settings: RunConfig) -> None:
        self._is_on = settings.gate == "hold"
        self._tolerance = settings.gate_tolerance
        self._accepted = 0
        self._undone: list[Span] = []

    @property
    def judges(self) -> bool:
        """Whether a new global model has to be tested: not the first one, which replaces untrained weights."""
        return self._is_on and self._accepted > 0

    def judge(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Compare candidate and accepted model over all samples that clients have tested them on.

        Parameters
        ----------
        replies : sequence of Reply
            Valid ones, as :func:`check` says.

        Returns
        -------
        dict
            For the record: the ``candidate``'s and the ``accepted`` model's accuracy, null if nobody had a sample; the
            number ``tested``; and whether the candidate is ``held``, which it is not if nobody had a sample.
        """
        names = (wire.GATE_TESTED, wire.GATE_CANDIDATE, wire.GATE_ACCEPTED)
        tested, candidate, accepted = (sum(int(reply.metrics[name]) for reply in replies) for name in names)
        return {
            "candidate": candidate / tested if tested else None,
            "accepted": accepted / tested if tested else None,
            "tested": tested,
            "held": accepted - candidate > self._tolerance * tested,
        }

    def settle(self, number: int, *, held: bool) -> None:
        """Take note of what became of a round's candidate."""
        if held:
            self._undone = _united([*self._undone, (number, number)])
        else:
            self._accepted = number

    def undo(self, before: Mapping[str, Any], to: int, number: int) -> None:
        """Go back, in a round, to what was after an earlier one; ``before`` is the :meth:`state` of then.

        The round itself is undone too: it may have been begun before, and cut off, and then devices have trained in it.
        """
        self.restore(before, to)
        self._undone = _united([*self._undone, (to + 1, number)])

    def told(self) -> dict[str, list[int]]:
        """The field of messages that names undone rounds to clients; none if there are no such rounds."""
        return {wire.UNDONE: [number for span in self._undone for number in span]} if self._undone else {}

    def state(self) -> dict[str, Any]:
        """What later rounds need, JSON-ready."""
        return {"accepted": self._accepted, "undone": self._undone}

    def restore(self, state: Mapping[str, Any], done: int) -> None:
        """Continue after round ``done`` with what :meth:`state` gave then; earlier versions gave nothing."""
        self._accepted = int(state.get("accepted", done))
        self._undone = [(int(first), int(last)) for first, last in state.get("undone", [])]


def check(reply: Reply) -> None:
    """Check a client's counts, each of which is in its range, against each other.

    Raises
    ------
    MessageError
        One is missing, or a model has more right answers than there are samples.
    """
    counts = [reply.metrics.get(name) for name in (wire.GATE_TESTED, wire.GATE_CANDIDATE, wire.GATE_ACCEPTED)]
    tested, *right = (count if isinstance(count, int) else -1 for count in counts)
    if not all(0 <= each <= tested for each in right):
        raise MessageError(f"{wire.GATE_TESTED} and what is right of it are {wire.shown(counts)}", "metrics")


def _united(spans: Iterable[Span]) -> list[Span]:
    united: list[Span] = []
    for first, last in sorted(spans):
        if united and first <= united[-1][1] + 1:
            united[-1] = united[-1][0], max(last, united[-1][1])
        else:
            united.append((first, last))
    return united[-_MOST_SPANS:]
