"""The errors a user can meet; each message is one line that says what is wrong and what would be right."""


class FedkaceError(Exception):
    """Base of every error this package raises on purpose.

    Parameters
    ----------
    message : str
        Becomes one line, whatever the values that it quotes.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(" ".join(message.splitlines()))


class ConfigError(FedkaceError):
    """A configuration key or study file is unknown, of the wrong type, out of range or in contradiction."""


class DataError(FedkaceError):
    """Files of a data set are missing, truncated or not what they should be."""


class StreamError(FedkaceError):
    """The stream asks for more samples or classes than the data set has."""


class StateError(FedkaceError):
    """A stored client state cannot be read back, or not be stored."""


class UnreadableStateError(StateError):
    """A stored file that may well be whole is not for this process: of a younger version, or of another key."""


class MessageError(FedkaceError):
    """A reply from a client is not fit to touch the global model.

    Attributes
    ----------
    kind : str
        One word for the reason, by which a run counts its failures: ``error`` (the client's own), ``size``,
        ``records``, ``arrays`` (names, shapes, types), ``values``, ``count``, ``norm``, ``metrics``, or ``content``
        for what a method finds fault with.
    """

    def __init__(self, text: str = "", kind: str = "content") -> None:
        super().__init__(text)
        self.kind = kind


class RunError(FedkaceError):
    """A run could not be started or did not come to its end."""


class ResultsError(FedkaceError):
    """A folder of results cannot be read."""
