"""Where a stored file belongs, by which a sealed file is recognised when it turns up elsewhere."""

from pathlib import Path

_EARLIER, _SERVER = "earlier", "server"


def home_of(folder: Path) -> Path:
    """The folder of the client or the run that a folder with stored files belongs to.

    ``CLIENT`` itself, ``CLIENT/earlier/RUN`` and ``RUN/server`` belong to ``CLIENT`` and ``RUN``.
    """
    folder = folder.resolve()
    if folder.parent.name == _EARLIER:
        return folder.parent.parent
    return folder.parent if folder.name == _SERVER else folder


def place_of(path: Path) -> str:
    """Owner and name of a file, ``cam7/state-000002.npz`` or ``first/server/checkpoint-000002.npz``.

    Moving a client's or a run's folder does not change its files' places; renaming it does.
    """
    home = home_of(path.parent)
    middle = f"{_SERVER}/" if path.parent.resolve().name == _SERVER else ""
    return f"{home.name}/{middle}{path.name}"
