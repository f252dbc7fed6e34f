"""A Ray of a machine that is busy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = """
import sys, time
if any(name in word for word in sys.orig_argv for name in ("dashboard/agent.py", "runtime_env/agent/main.py")):
    time.sleep(25)
"""
PROGRAM = """
import ray
from fedkace_flwr.flower.lean_ray import make_ray_lean
make_ray_lean()
ray.init(num_cpus=1, include_dashboard=False)
print("answer", ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


@pytest.mark.slow
def test_ray_starts_although_its_agents_take_longer_than_it_waits_for_them(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "answer 42" in done.stdout, done.stderr[-2000:]
