"""The data sets by name."""

from fedkace_flwr import plugins
from fedkace_flwr.data.images import Framing
from fedkace_flwr.data.readers.arrays import find_arrays
from fedkace_flwr.data.readers.cifar import CIFAR10, CIFAR100
from fedkace_flwr.data.readers.digits import find_digits, find_wine
from fedkace_flwr.data.readers.hub import find_hub
from fedkace_flwr.data.readers.image_folders import find_folder, find_imagenet100, imagenet_framing
from fedkace_flwr.data.readers.mnist import EMNIST, find_emnist, find_mnist
from fedkace_flwr.data.readers.source import Source, found
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.samples import Form
from fedkace_flwr.sections import DataConfig

DATASETS: dict[str, Source] = {
    "digits": Source(classes=10, image_size=8, find=find_digits),
    "cifar10": Source(classes=10, image_size=32, find=CIFAR10.find, mirrors=True, downloaded=CIFAR10.folder),
    "cifar100": Source(classes=100, image_size=32, find=CIFAR100.find, mirrors=True, downloaded=CIFAR100.folder),
    "mnist": Source(classes=10, image_size=28, find=find_mnist),
    **{f"emnist-{split}": Source(classes=None, image_size=28, find=find_emnist) for split in EMNIST},
    "imagenet100": Source(classes=100, image_size=224, find=find_imagenet100, framing=imagenet_framing, mirrors=True),
    "folder": Source(classes=None, image_size=64, find=find_folder, framing=Framing.of_files),
    "hub": Source(classes=None, image_size=32, find=find_hub, framing=Framing.of_files),
    "wine": Source(classes=3, image_size=0, find=find_wine),
    "arrays": Source(classes=None, image_size=0, find=find_arrays),
}
"""The data sets that come with the package, by name; other packages add theirs by entry points."""


def source_of(name: str) -> Source:
    """Return the entry of a data set.

    Raises
    ------
    ConfigError
        There is no data set of that name.
    """
    if name in DATASETS:
        return DATASETS[name]
    source = plugins.loaded("dataset", name)
    if source is None:
        known = [*DATASETS, "inbox", *plugins.found("dataset")]
        near = closest(name, [each for each in known if each != "folder"])
        raise ConfigError(
            f"dataset = {name!r}: must be one of {', '.join(known)}; for images of your own, sort them into folders "
            f"by class and set dataset = folder{near}"
        )
    if not isinstance(source, Source):
        raise plugins.broken("dataset", name, "must be a fedkace_flwr.data.readers.Source")
    return source


def framing_of(config: DataConfig, size: int) -> Framing:
    """Return how the pictures of a data set, or of an inbox, are turned into squares of ``size`` pixels.

    Raises
    ------
    ConfigError
        There is no data set of that name.
    """
    return Framing.of_files(size) if config.arrives else source_of(config.source).framing(size)


def are_arrays(config: DataConfig) -> bool:
    """Whether the samples that a configuration asks for are arrays of numbers, and not pictures; no file is opened.

    Raises
    ------
    ConfigError
        There is no data set of that name.
    """
    if config.arrives:
        return bool(config.inbox_shape)
    return not source_of(config.source).image_size


def form_asked(config: DataConfig) -> Form:
    """What each sample is that a configuration asks for; of arrays, the files tell.

    Raises
    ------
    FedkaceError
        There is no data set of that name, or the files of its arrays are missing or not as expected.
    """
    if config.arrives:
        shape = config.inbox_lengths()
        return Form.array(*shape) if shape else Form.picture(config.image_size)
    source = source_of(config.source)
    if source.image_size:
        return Form.picture(config.image_size or source.image_size)
    return Form.array(*found(config.source, source, config, 0).shape)


def may_be_mirrored(config: DataConfig) -> bool:
    """Whether a mirrored image still shows its class, by the key ``mirroring`` or else by the data set.

    Raises
    ------
    ConfigError
        There is no data set of that name.
    """
    if config.mirroring == "auto":
        return not config.arrives and source_of(config.source).mirrors
    return config.mirroring == "allowed"
