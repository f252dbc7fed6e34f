"""Start Flower's SuperLink with a database that waits for its turn.

Flower 1.41 gives up on SQLite's lock after five seconds and answers with an error, which costs a client's reply, or
its own SuperExec. On a busy machine or a slow disk five seconds are soon over.
"""

import sys

from flwr.supercore import constant

LOCK_MILLISECONDS = "120000"

# Before the modules that take the tuple over are imported.
constant.SQLITE_PRAGMAS = tuple(
    (name, LOCK_MILLISECONDS if name == "busy_timeout" else value) for name, value in constant.SQLITE_PRAGMAS
)

if __name__ == "__main__":
    from flwr.supercore.sql_mixin import SQLITE_PRAGMAS
    from flwr.superlink.cli import flower_superlink

    if ("busy_timeout", LOCK_MILLISECONDS) not in SQLITE_PRAGMAS:
        sys.exit(
            "error: this version of Flower takes the database's busy_timeout from elsewhere; see deploy/superlink.py"
        )
    sys.exit(flower_superlink())
