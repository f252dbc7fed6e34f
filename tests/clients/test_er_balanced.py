"""Experience replay from a class-balanced buffer."""

from collections.abc import Callable
from pathlib import Path

from support.common import rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline

Make = Callable[..., Config]


def test_every_class_has_as_many_places_as_any_other_and_none_stays_empty(small: Make) -> None:
    config = small(method="er-balanced", overlap=0, rounds=4, epochs=2, capacity=20, samples_per_class=12)
    run_inline(config)
    for line in rounds_of(Path(config.run.results_dir) / config.run.run_name):
        for counts in line["buffer_classes"]:
            met = [count for count in counts if count]
            assert sum(met) == 20 and max(met) - min(met) <= 1, line["round"]
