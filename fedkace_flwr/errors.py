"""The errors shown to users; each message is one line that says what is wrong and what would be right."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(text: str, known: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the known name nearest to a misspelt one, or nothing if none is near."""
    near = nearest(text, known)
    return f"; did you mean {near}?" if near else ""


def nearest(text: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to a misspelt one, in capitals or not; None if none is near."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(text.lower(), names, n=1)
    return names[near[0]] if near else None


class FedkaceError(Exception):
    """Base class of all errors that this package raises deliberately.

    Parameters
    ----------
    message : str
        The message; line breaks in quoted values are replaced so that it stays on one line.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(message.splitlines()))


class ConfigError(FedkaceError):
    """A configuration key or study file is unknown, of the wrong type, out of range or contradictory."""


class DataError(FedkaceError):
    """Files of a data set are missing, truncated or not in the expected format."""


class MissingDataError(DataError):
    """The files of a data set are not on this machine."""


class StreamError(FedkaceError):
    """The stream requires more samples or classes than the data set has."""


class StateError(FedkaceError):
    """A client state cannot be stored or read back."""


class UnreadableStateError(StateError):
    """A stored file may be intact but is unreadable here: written by a newer version, or encrypted with another key."""


class MessageError(FedkaceError):
    """A message must not affect anything: a reply of a client the global model, or a message of the server a client.

    Attributes
    ----------
    kind : str
        One word for the reason, by which a run counts its failures: ``error`` (reported by the client), ``size``,
        ``records``, ``arrays`` (names, shapes, types), ``values``, ``count``, ``metrics``, or ``content`` (rejected by
        the method). Comparisons of replies have further kinds (docs/method.md, "Which replies count").
    """

    def __init__(self, text: str = "", kind: str = "content") -> None:
        super().__init__(text)
        self.kind = kind


class PolicyError(FedkaceError):
    """A site's policy refuses a run, or cannot be read."""


class RunError(FedkaceError):
    """A run could not be started or did not finish."""


class ModelError(FedkaceError):
    """A model that was taken away cannot be written or read."""


class ResultsError(FedkaceError):
    """A folder of results cannot be read."""
