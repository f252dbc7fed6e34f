"""Questions of the server that a device answers without importing PyTorch: an idle device spends little on them."""

import logging

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedkace_flwr.data.inbox import waiting
from fedkace_flwr.errors import FedkaceError, MessageError
from fedkace_flwr.messaging import wire
from fedkace_flwr.storage.folders import absolute
from fedkace_flwr.storage.names import printable

logger = logging.getLogger(__name__)

QUESTIONS = frozenset({str(MessageType.QUERY), f"{MessageType.QUERY}.{wire.WAITING}"})
"""The types of their messages."""

_CLIENT_FAILED = 2  # Flower's code for an error that an app has raised
_LONGEST_LINE = 900


class OneLineApp(ClientApp):
    """A ClientApp that says in one line what it refuses: in the log, and as the reply."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        try:
            return super().__call__(message, context)
        except FedkaceError as error:
            line = printable(f"{type(error).__name__}: {error}")[:_LONGEST_LINE]
            logger.error("%s", line)
            return Message(Error(_CLIENT_FAILED, line), reply_to=message)


def identity(message: Message, context: Context) -> Message:
    """Name the partition of the data at this node, if it is told one."""
    told = {
        name: context.node_config[name] for name in (wire.PARTITION, wire.PARTITIONS) if name in context.node_config
    }
    return Message(RecordDict({wire.CONFIG: ConfigRecord(dict(told))}), reply_to=message)


def waiting_samples(message: Message, context: Context) -> Message:
    """Say how many labelled samples wait in this node's inbox, up to the number that the server gives.

    With open classes, it gives those agreed so far as well; the answer then names the classes for which files wait.

    Raises
    ------
    MessageError
        The node has no inbox, or the server gives no number or no names.
    DataError
        The inbox cannot be read.
    """
    told = message.content.config_records.get(wire.CONFIG, ConfigRecord())
    most, folder = told.get(wire.MOST), str(context.node_config.get(wire.INBOX, ""))
    if type(most) is not int:
        raise MessageError(f"{wire.MOST} = {wire.shown(most)}: must be a whole number")
    if not folder:
        raise MessageError(f"--node-config: no {wire.INBOX}")
    agreed = wire.agreed_classes(told, wire.MOST_CLASSES).names if wire.CLASS_NAMES in told else None
    count, names = waiting(absolute(folder, wire.INBOX), most, agreed)
    answer = ConfigRecord(
        {wire.WAITING: count, **({wire.NEW_CLASSES: names[: wire.MOST_NEW_CLASSES]} if names else {})}
    )
    return Message(RecordDict({wire.CONFIG: answer}), reply_to=message)


app = OneLineApp()
app.query()(identity)
app.query(wire.WAITING)(waiting_samples)
