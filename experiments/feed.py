"""Play a data set's streams into inboxes, as cameras or sensors would do on real devices."""

import io
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, ResultsError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.files import write_bytes
from fedkace_flwr.storage.folders import make_folder
from fedkace_flwr.storage.targets import claim

logger = logging.getLogger(__name__)

_LONGEST = 10**6  # seconds between two rounds; much more would overflow the clock


def feed(config: Config, folder: Path, *, every: float = 0.0, tell: Callable[[str], object] = logger.info) -> None:
    """Write each client's chunks to ``FOLDER/client-K/new``, one file per round, and its test samples to ``test``.

    The files of an earlier feed that still lie there are removed.

    Parameters
    ----------
    config : Config
        Data set and streams, as in simulation.
    folder : Path
        New, empty, or that of an earlier feed; new folders are for this user only.
    every : float
        Seconds between the files of consecutive rounds.
    tell : callable
        Takes each line about what is written.

    Raises
    ------
    FedkaceError
        ``every`` is no time to wait, the data set cannot be opened, a stream would run out of samples, or the folder
        cannot be written.
    """
    if not 0 <= every <= _LONGEST:
        raise ConfigError(f"--every {every:g}: must be a number of seconds from 0 to {_LONGEST}")
    experiment = Experiment(config)
    experiment.check_streams()
    everything = torch.ones(experiment.dataset.num_classes, dtype=torch.bool)
    homes = [folder / f"client-{client}" for client in range(config.stream.clients)]
    earlier = set(folder.glob("client-*"))
    for place in [path for home in earlier.union(homes) for path in (home, home / "test", home / "new")]:
        if place.is_symlink():
            raise ConfigError(f"{place}: is a link, which is not followed; remove it, or name another folder")
    claim(folder, "inboxes")
    for home in earlier:
        for path in (home / "test" / "test.npz", *(home / "new").glob("chunk-??????.npz")):
            path.unlink(missing_ok=True)
    for client, home in enumerate(homes):
        drop(experiment, experiment.test_set(client, everything), home / "test" / "test.npz")
    for number in range(1, config.stream.rounds + 1):
        for client, home in enumerate(homes):
            if len(chunk := experiment.chunk(client, number)):
                drop(experiment, chunk, home / "new" / f"chunk-{number:06d}.npz")
        if every:
            tell(f"round {number} of {config.stream.rounds}: chunks written")
        if every and number < config.stream.rounds:
            time.sleep(every)
    tell(f"written: {config.stream.rounds} chunks for each of {len(homes)} clients, in {folder}")
    if not (form := experiment.dataset.form).is_picture:
        dataset = experiment.dataset
        keys = {
            "class-names": dataset.class_names,
            "inbox-shape": form.shape,
            "inbox-statistics": [f"{mean}/{std}" for mean, std in zip(dataset.mean, dataset.std, strict=True)],
        }
        tell("keys for these inboxes:")
        for name, values in keys.items():
            tell(f'{name} = "{", ".join(map(str, values))}"')


def drop(experiment: Experiment, samples: Samples, path: Path) -> None:
    """Write samples to a file that only this user can read, and that never appears half-written.

    Raises
    ------
    ResultsError
        It cannot be written.
    """
    values, labels, content = samples.images(experiment.dataset.fetch), samples.labels.numpy(), io.BytesIO()
    if experiment.dataset.form.is_picture:
        np.savez_compressed(content, images=values.permute(0, 2, 3, 1).contiguous().numpy(), labels=labels)
    else:
        np.savez_compressed(content, x=values.numpy(), y=labels)
    try:
        make_folder(path.parent)
        write_bytes(path, content.getvalue(), mode=0o600)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror})") from error
