"""Start Flower's SuperLink with a longer timeout for database locks, and with signatures of apps.

Flower (up to 1.42) waits five seconds for SQLite's lock and then fails the request, which loses a client's reply or
ends its own SuperExec. On a busy machine or a slow disk a lock is often held for longer.

Its SuperNodes can refuse apps that are not signed (``--trusted-entities``), but its SuperLink passes on signatures only
of apps that come from Flower's public registry. This one also passes on those in the folder ``FEDKACE_SIGNATURES``,
which ``sign-app.py`` fills. A SuperLink cannot forge them: the SuperNodes verify them.
"""

import inspect
import json
import os
import sys
from pathlib import Path

from flwr.supercore import constant

LOCK_MILLISECONDS = "120000"
LONGEST_SIGNATURE = 10_000  # bytes of a file

# This must precede the import of the modules that copy the tuple.
constant.SQLITE_PRAGMAS = tuple(
    (name, LOCK_MILLISECONDS if name == "busy_timeout" else value) for name, value in constant.SQLITE_PRAGMAS
)


def signatures_of(folder: Path, app: str) -> dict[str, str]:
    """Return the signatures of an app as Flower sends them to SuperNodes; empty if there are none.

    Parameters
    ----------
    folder : Path
        Folder with files ``HASH.NAME.json``.
    app : str
        The app's SHA-256, in hexadecimal.
    """
    found = {}
    for path in sorted(folder.glob(f"{app}.*.json")):
        try:
            if path.stat().st_size > LONGEST_SIGNATURE:
                raise ValueError(f"larger than {LONGEST_SIGNATURE} bytes")
            read = json.loads(path.read_text(encoding="utf-8"))
            name, signature, signed_at = read["public_key_id"], read["signature"], read["signed_at"]
            if not (isinstance(name, str) and isinstance(signature, str) and type(signed_at) is int and signed_at >= 0):
                raise ValueError("public_key_id and signature must be strings, signed_at a whole number")
            found[name] = json.dumps({"signature": signature, "signed_at": signed_at})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            print(f"warning: {path}: not a signature, left out ({type(error).__name__}: {error})", file=sys.stderr)
    # Without this entry SuperNodes take it that their SuperLink knows no signatures.
    return {**found, "valid_license": "Valid"} if found else {}


def attach_signatures(folder: Path) -> None:
    """Make the SuperLink send the signatures in a folder along with the apps of new runs."""
    from flwr.superlink.servicer.control import control_handlers

    plain = getattr(control_handlers, "Fab", None)
    if plain is None or list(inspect.signature(plain).parameters) != ["hash_str", "content", "verifications"]:
        sys.exit(
            "error: FEDKACE_SIGNATURES: this version of Flower stores apps in another way; see deploy/superlink.py"
        )

    def signed(hash_str: str, content: bytes, verifications: dict[str, str]) -> object:
        return plain(hash_str, content, {**verifications, **signatures_of(folder, hash_str)})

    control_handlers.Fab = signed


if __name__ == "__main__":
    from flwr.supercore.sql_mixin import SQLITE_PRAGMAS
    from flwr.superlink.cli import flower_superlink

    if ("busy_timeout", LOCK_MILLISECONDS) not in SQLITE_PRAGMAS:
        sys.exit(
            "error: this version of Flower does not read busy_timeout from SQLITE_PRAGMAS; see deploy/superlink.py"
        )
    if os.environ.get("FEDKACE_SIGNATURES"):
        attach_signatures(Path(os.environ["FEDKACE_SIGNATURES"]))
    sys.exit(flower_superlink())
