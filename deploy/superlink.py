"""Start Flower's SuperLink with a longer timeout for database locks.

Flower 1.41 waits five seconds for SQLite's lock and then fails the request, which loses a client's reply or ends its
own SuperExec. On a busy machine or a slow disk a lock is often held for longer.
"""

import sys

from flwr.supercore import constant

LOCK_MILLISECONDS = "120000"

# This must precede the import of the modules that copy the tuple.
constant.SQLITE_PRAGMAS = tuple(
    (name, LOCK_MILLISECONDS if name == "busy_timeout" else value) for name, value in constant.SQLITE_PRAGMAS
)

if __name__ == "__main__":
    from flwr.supercore.sql_mixin import SQLITE_PRAGMAS
    from flwr.superlink.cli import flower_superlink

    if ("busy_timeout", LOCK_MILLISECONDS) not in SQLITE_PRAGMAS:
        sys.exit(
            "error: this version of Flower does not read busy_timeout from SQLITE_PRAGMAS; see deploy/superlink.py"
        )
    sys.exit(flower_superlink())
