"""Which GPUs Ray shows to each client. Ray counts GPUs as it is told to, whether they are there or not."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from fedkace_flwr import client_app
from fedkace_flwr.experiments.running.engines import FlowerEngine
from fedkace_flwr.experiments.running.workers import VISIBLE, Gpu, packed
from fedkace_flwr.flower import lean_ray

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray-gpus")]

NAMES = ["4", "7"]
GPUS = [Gpu(name, 1, 1) for name in NAMES]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of two declared GPUs, in the environment that the runner gives to Flower's simulation."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lean_ray.ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv(VISIBLE, FlowerEngine(4, 0.5, visible=NAMES).environment[VISIBLE])
        ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


@pytest.mark.parametrize(
    ("fraction", "clients", "seen"),
    [(0, 1, [1]), (0.1, 3, [3]), (0.5, 3, [2, 1]), (1, 2, [1, 1])],
)
@pytest.mark.usefixtures("cluster")
def test_a_client_sees_the_gpu_that_it_has_a_share_of(fraction: float, clients: int, seen: list[int]) -> None:
    """One GPU each, filled one after the other, as the plan says; without a share none."""

    class Client:  # defined here, so that its process need not import what this module imports
        def found(self) -> tuple[str | None, float]:
            share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)
            return os.environ.get("CUDA_VISIBLE_DEVICES"), share

    actor_of: Any = ray.remote(num_cpus=1, num_gpus=fraction)
    actors = [actor_of(Client).remote() for _ in range(clients)]
    found = ray.get([actor.found.remote() for actor in actors])
    for actor in actors:
        ray.kill(actor)
    assert [share for _, share in found] == pytest.approx([fraction] * clients)
    counts = Counter(visible for visible, _ in found)
    assert sorted(counts.values(), reverse=True) == seen
    assert set(counts) <= ({*NAMES} if fraction else {""})
    if fraction:
        planned = Counter(gpu.name for gpu in packed(GPUS, clients, fraction))
        assert sorted(planned.values(), reverse=True) == seen


@pytest.mark.usefixtures("cluster")
def test_a_client_knows_its_share() -> None:
    given = ray.remote(num_gpus=0.25)(client_app._share_of_gpu)
    assert ray.get(given.remote()) == 0.25
