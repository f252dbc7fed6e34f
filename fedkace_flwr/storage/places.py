"""Where a stored file belongs, by which a sealed file is recognised when it turns up elsewhere."""

from pathlib import Path

EARLIER = "earlier"
"""The folder in a client's folder that holds the files of earlier runs, ``earlier/RUN/``."""

_CHECKPOINT = "checkpoint-"


def home_of(path: Path) -> Path:
    """The folder of the client or the run that a stored file belongs to.

    ``CLIENT/FILE`` and ``CLIENT/earlier/RUN/FILE`` belong to ``CLIENT``, ``RUN/server/checkpoint-ROUND.npz`` to ``RUN``.
    """
    folder = path.parent.resolve()
    if path.name.startswith(_CHECKPOINT):
        return folder.parent
    return folder.parent.parent if folder.parent.name == EARLIER else folder


def place_of(path: Path) -> str:
    """Owner and name of a file, ``cam7/state-000002.npz`` or ``first/server/checkpoint-000002.npz``.

    Moving a client's or a run's folder does not change its files' places; renaming it does.
    """
    middle = f"{path.parent.resolve().name}/" if path.name.startswith(_CHECKPOINT) else ""
    return f"{home_of(path).name}/{middle}{path.name}"
