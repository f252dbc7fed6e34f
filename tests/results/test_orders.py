"""Orders to a run, whoever gives them."""

import os
from pathlib import Path

import pytest

from fedkace_flwr.results.orders import Orders


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_an_order_that_root_gives_belongs_to_the_user_of_the_run(tmp_path: Path) -> None:
    os.chown(tmp_path, 4711, 4712)
    Orders(tmp_path).stop()
    for path in (tmp_path / "orders", tmp_path / "orders" / "stop"):
        assert (path.stat().st_uid, path.stat().st_gid) == (4711, 4712)
