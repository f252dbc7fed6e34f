"""Keys of the data set, and of where a client's samples come from."""

import math
from dataclasses import dataclass
from typing import Literal
from unicodedata import normalize

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import key

_MOST_NUMBERS = 2**24  # in a sample of an inbox: 64 MiB


@dataclass(frozen=True)
class DataConfig:
    """Data set."""

    dataset: str = key(
        "digits",
        "Data set: `digits` and `wine`, a table (both bundled with scikit-learn), `cifar10`, `cifar100`, `mnist`, `emnist-SPLIT` (`balanced`, `byclass`, `bymerge`, `letters`, `digits` or `mnist`), `imagenet100`, `folder` (any image folder with `train/` and perhaps `val/` or `test/`), `hub:OWNER/NAME` (Hugging Face Hub; `hub` alone reads what `save_to_disk` has written to `data-dir`; docs/running.md), `arrays` (tables, series or other arrays of numbers, in `.npz`, `.csv` or `.parquet` files; `arrays?label=COLUMN` names a table's labels; docs/running.md), `inbox` (files that arrive on each device; docs/edge-data.md), or one of another package (docs/extend.md).",
    )
    data_dir: str = key(
        "data",
        "Folder with the original files (docs/running.md); with `arrays`, perhaps the file itself. CIFAR's are downloaded if they are missing.",
        affects="place",
    )
    num_classes: int = key(
        0, "Use only this many classes, those from `first-class` on; 0 uses all.", unit="classes", low=0
    )
    first_class: int = key(
        0, "With `num-classes`: the position, from 0, of the first class used in the data set's list of classes.", low=0
    )
    image_size: int = key(
        0,
        "Height and width of the images. 0: the data set's own size (digits 8, cifar10 and cifar100 32, mnist and emnist 28, imagenet100 224, folder 64, hub 32); must be set for an inbox of pictures, and be 0 with arrays.",
        unit="pixels",
        low=0,
        high=1024,
    )
    normalise: bool = key(
        True,
        "Reading: subtract the data set's mean and divide by its standard deviation, per channel; of a table, per feature.",
    )
    mirroring: Literal["auto", "allowed", "never"] = key(
        "auto",
        "Whether an image mirrored left to right still shows its class, so that `augment = auto` and `test-time-augmentation = auto` may mirror it: `auto` says yes for cifar10, cifar100, imagenet100 and data sets of packages that declare it. Set `allowed` for photographs of your own unless left and right tell classes apart, as in letters and road signs.",
    )
    test_per_class: int = key(
        0,
        "Number of test images per class that each client draws once for its test set; 0 uses the whole test split (the paper draws 100 of 300 on ImageNet100).",
        unit="images",
        low=0,
    )
    test_share: float = key(
        0.2,
        "Share of each class's samples that is drawn from the seed as the test split of a data set that has none, at least one sample (docs/running.md).",
        above=0,
        high=0.99,
    )
    classes: Literal["fixed", "open"] = key(
        "fixed",
        "Whether the classes are those of the data set or, of an inbox, those in `class-names`, or grow: with `open` the server gives each name that a device brings the next number, and its samples wait until then (docs/edge-data.md).",
    )
    class_names: str = key(
        "",
        "With `dataset = inbox`: the agreed classes, comma-separated, in the order of their labels. With `classes = open`, of any data set, the first ones, of which there may be none.",
    )
    max_classes: int = key(
        50,
        "With `classes = open`: the number of the network's outputs, and so the most classes that a run can have.",
        unit="classes",
        low=2,
        high=1000,
    )
    inbox_bound: int = key(
        10000,
        "Maximum number of samples that a round takes from an inbox. Files are never split; a file that holds more is rejected.",
        unit="samples",
        low=2,  # a single sample may have to wait for another
        high=100_000,
    )
    inbox_after: Literal["keep", "delete"] = key(
        "keep",
        "What happens to an inbox's files once they are learned: `keep` moves them to `done/`, `delete` deletes them.",
        affects="place",
    )
    inbox_shape: str = key(
        "",
        "With `dataset = inbox`: the shape of each sample, if samples are arrays of numbers and not pictures: `13` for a table's 13 features, `6, 100` for series of 6 channels and 100 steps.",
    )
    inbox_statistics: str = key(
        "",
        "With `inbox-shape`: `MEAN/STD`, by which samples are normalised, for each feature of a table or channel of a series, separated by commas, or one for all; empty: they are not normalised. `fedkace feed` shows those of a data set.",
    )
    unlabelled_bound: int = key(
        10000,
        "Maximum number of samples in an inbox that wait for a label; the oldest of more are dropped, as learned files are.",
        unit="samples",
        low=0,
        high=100_000,
        living=True,
    )
    unlabelled_age: float = key(
        2592000.0,
        "Time after which a sample that waits for a label is dropped; by default 30 days.",
        unit="seconds",
        above=0,
        living=True,
    )

    @property
    def source(self) -> str:
        """The name by which the data set's reader is found: ``hub`` for ``hub:OWNER/NAME``."""
        return self.dataset.partition("?")[0].partition(":")[0]

    @property
    def hub_name(self) -> str:
        """With ``hub:OWNER/NAME``, what follows the colon; otherwise empty."""
        return self.dataset.partition("?")[0].partition(":")[2]

    @property
    def name(self) -> str:
        """The name of the data that are learned, to show."""
        return self.hub_name or self.source

    @property
    def arrives(self) -> bool:
        """Whether samples arrive in an inbox on each device, and are not drawn from a data set."""
        return self.dataset == "inbox"

    @property
    def grows(self) -> bool:
        """Whether classes get names and numbers as they come."""
        return self.classes == "open"

    def named_classes(self) -> tuple[str, ...]:
        """The names in ``class-names``, in Unicode's composed form (NFC)."""
        names = self.class_names.split(",") if self.class_names.strip() else []
        return tuple(normalize("NFC", name.strip()) for name in names)

    def inbox_lengths(self) -> tuple[int, ...]:
        """The lengths in ``inbox-shape``; none if samples are pictures.

        Raises
        ------
        ConfigError
            They are not as the key has them.
        """
        try:
            lengths = tuple(int(each) for each in self.inbox_shape.split(",")) if self.inbox_shape.strip() else ()
        except ValueError:
            lengths = (0,)
        if lengths and not (min(lengths) > 0 and math.prod(lengths) <= _MOST_NUMBERS):
            raise ConfigError(
                f"inbox-shape = {self.inbox_shape!r:.200}: must be whole numbers above 0, separated by commas, whose "
                f"product is at most {_MOST_NUMBERS}"
            )
        return lengths

    def inbox_statistics_of(self, length: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Means and standard deviations of samples whose first dimension has this length.

        Raises
        ------
        ConfigError
            They are not as the key ``inbox-statistics`` has them.
        """
        texts = self.inbox_statistics.split(",") if self.inbox_statistics.strip() else ["0/1"]
        try:
            pairs = [(float(mean), float(std)) for mean, std in (each.split("/") for each in texts)]
        except ValueError:
            pairs = []
        pairs = pairs * length if len(pairs) == 1 else pairs
        if len(pairs) != length or not all(math.isfinite(mean) and 0 < std < math.inf for mean, std in pairs):
            raise ConfigError(
                f"inbox-statistics = {self.inbox_statistics!r:.200}: with inbox-shape = {self.inbox_shape!r:.100}, must "
                f"be {length} of MEAN/STD, or one, separated by commas, finite and with STD above 0"
            )
        return tuple(mean for mean, _ in pairs), tuple(std for _, std in pairs)
