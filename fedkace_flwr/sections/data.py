"""Keys of the data set, and of where a client's samples come from."""

from dataclasses import dataclass
from typing import Literal
from unicodedata import normalize

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class DataConfig:
    """Data set."""

    dataset: str = key(
        "digits",
        "Data set: `digits` (bundled with scikit-learn), `cifar10`, `cifar100`, `mnist`, `emnist`, `imagenet100`, `folder` (any image folder with `train/` and `val/` or `test/`), `hub` (a data set in Hugging Face's format; needs the extra `hub`), or the name of one that another package adds (docs/extend.md).",
    )
    data_dir: str = key(
        "data",
        "Folder with the original files: it holds `cifar-10-batches-py/` (cifar10) or `cifar-100-python/` (cifar100), both downloaded if missing, the four files of MNIST or EMNIST (mnist, emnist), ILSVRC2012's `train/` (imagenet100), `train/` and `val/` or `test/` (folder), or what `save_to_disk` has written (hub). Relative to the working directory of the process.",
        affects="place",
    )
    cache_dir: str = key(
        "",
        "Folder for the prepared, memory-mapped arrays. Empty: `$FEDKACE_CACHE_DIR`, or else `~/.cache/fedkace_flwr`.",
        affects="place",
    )
    num_classes: int = key(0, "Use only this many classes, the first ones; 0 uses all.", unit="classes", low=0)
    image_size: int = key(
        0,
        "Height and width of the images. 0: the data set's own size (digits 8, cifar10 and cifar100 32, mnist and emnist 28, imagenet100 224, folder 64, hub 32); must be set for an inbox.",
        unit="pixels",
        low=0,
        high=1024,
    )
    emnist_split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = key(
        "balanced",
        "With `dataset = emnist`: which of EMNIST's splits, which differ in their classes (47, 62, 47, 26, 10 and 10).",
    )
    hub_name: str = key(
        "",
        "With `dataset = hub`: name of the data set on the Hugging Face Hub, such as `OWNER/NAME`, or `OWNER/NAME@REVISION` for one version of it; it is downloaded once. Empty: the folder `data-dir`, as `save_to_disk` writes it.",
    )
    hub_subset: str = key("", "With `hub-name`: the subset, for data sets that have several.")
    hub_image: str = key("", "With `dataset = hub`: the column of images. Empty: the only one of the kind `Image`.")
    hub_label: str = key(
        "",
        "With `dataset = hub`: the column of labels; if it declares no names, its values are the classes. Empty: the only one of the kind `ClassLabel`.",
    )
    hub_test: str = key(
        "",
        "With `dataset = hub`: the split for testing; `train` is trained on. Empty: the first of `test`, `validation`, `valid` and `val` that there is.",
    )
    normalise: bool = key(
        True, "Reading: subtract the data set's mean and divide by its standard deviation, per channel."
    )
    mirroring: Literal["auto", "allowed", "never"] = key(
        "auto",
        "Whether an image mirrored left to right still shows its class, so that `augment = auto` and `views = auto` may mirror it: `auto` says yes for cifar10, cifar100, imagenet100 and data sets of packages that declare it, and otherwise no. Set `allowed` for photographs of your own (folder, hub or inbox) unless left and right tell classes apart, as in letters and road signs.",
    )
    test_per_class: int = key(
        0,
        "Number of test images per class that each client draws once for its test set; 0 uses the whole test split (the paper draws 100 of 300 on ImageNet100).",
        unit="images",
        low=0,
    )
    data_source: Literal["stream", "inbox"] = key(
        "stream",
        "Source of the clients' samples: a `stream` drawn from the data set (simulation), or an `inbox` on each device into which files are dropped (docs/edge-data.md).",
    )
    class_names: str = key(
        "",
        "With `data-source = inbox`: the agreed classes, comma-separated, in the order of their labels; `dataset` and `num-classes` are then ignored.",
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

    @property
    def name(self) -> str:
        """The name of the data that are learned, to show."""
        if self.data_source == "inbox":
            return "inbox"
        return self.hub_name if self.dataset == "hub" and self.hub_name else self.dataset

    def classes(self) -> tuple[str, ...]:
        """The names in ``class-names``, in Unicode's composed form (NFC)."""
        return tuple(normalize("NFC", name.strip()) for name in self.class_names.split(","))
