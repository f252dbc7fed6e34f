"""Experience replay from a class-balanced buffer."""

from collections.abc import Callable
from pathlib import Path

from support.common import rounds_of

from experiments.running.inline import run_inline
from fedkace_flwr.config import Config
from fedkace_flwr.registry import configured

Make = Callable[..., Config]


def test_every_class_has_as_many_places_as_any_other_and_none_stays_empty(small: Make) -> None:
    config = small(method="er-balanced", overlap=0, rounds=4, epochs=2, capacity=20, samples_per_class=12)
    run_inline(config)
    for line in rounds_of(Path(config.run.results_dir) / config.run.run_name):
        for counts in line["buffer_classes"]:
            met = [count for count in counts if count]
            assert sum(met) == 20 and max(met) - min(met) <= 1, line["round"]


def test_only_images_that_may_be_mirrored_are() -> None:
    for dataset, augment in (("digits", "none"), ("cifar100", "flip-shift"), ("folder", "none")):
        config = Config.parse({"augment": "auto", "dataset": dataset, "data-dir": "anywhere"})
        assert configured(config)[1].training.augment == augment
    inbox = {"data-source": "inbox", "class-names": "a,b", "image-size": 8, "augment": "auto"}
    assert configured(Config.parse(inbox))[1].training.augment == "none"
