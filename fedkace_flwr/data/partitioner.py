"""The streams as a partitioner of Flower Datasets, for Flower apps that use nothing else of this package.

Needs the extra ``hub``. docs/streams.md has an example.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkace_flwr.data.stream import ClientStream, client_stream
from fedkace_flwr.errors import ConfigError, DataError, closest
from fedkace_flwr.keys import checked, default_of, kebab, keys_of
from fedkace_flwr.sections import StreamConfig

try:
    from datasets import Dataset
    from flwr_datasets.partitioner import Partitioner
except ImportError as fault:
    raise ImportError("StreamPartitioner needs the extra `hub`: pip install 'fedkace-flwr[hub]'") from fault


class StreamPartitioner(Partitioner):  # type: ignore[misc]  # untyped where it is installed, too
    """Partition a data set into streams: one partition for each client, made up of a chunk for each round.

    With the same rows, keys and seed, partition k holds the samples that client k receives in a run of this project, in
    the same order. Nothing depends on the order or the number of calls.

    Parameters
    ----------
    num_partitions : int
        Number of clients K.
    partition_by : str
        Name of the column of labels. The classes are those that the column declares, or else its values in ascending
        order.
    rounds, window, overlap, samples_per_class : int
        Number of rounds T, classes in a chunk W, classes that two consecutive chunks share O, and samples of each class
        in a chunk n (paper, section 5.1).
    seed : int
        Seed of all draws.
    **keys : bool, float or str
        The other keys of the stream, such as ``stream="dirichlet"``; see docs/streams.md.

    Raises
    ------
    ConfigError
        A key is unknown, of the wrong type or out of range.

    Examples
    --------
    >>> partitioner = StreamPartitioner(
    ...     num_partitions=10, partition_by="label", rounds=100, window=5, overlap=4, samples_per_class=100
    ... )
    >>> fds = FederatedDataset(dataset="uoft-cs/cifar10", partitioners={"train": partitioner}, shuffle=False)
    >>> stream = fds.load_partition(3)  # all rounds of client 3, one after the other
    >>> chunk = partitioner.load_chunk(3, round_number=7)
    """

    def __init__(
        self,
        num_partitions: int,
        partition_by: str,
        *,
        rounds: int,
        window: int,
        overlap: int,
        samples_per_class: int,
        seed: int = 0,
        **keys: Any,
    ) -> None:
        super().__init__()
        given = {
            "clients": num_partitions,
            "rounds": rounds,
            "window": window,
            "overlap": overlap,
            "samples_per_class": samples_per_class,
            **keys,
        }
        declared = keys_of(StreamConfig)
        for name in ("fraction_train", "label_delay", "label_share"):
            del declared[name]  # who trains, and when labels come, is the strategy's choice, and changes no partition
        for name in given.keys() - declared.keys():
            raise ConfigError(
                f"unknown key {name} = {keys[name]!r:.100}; must be one of {', '.join(declared)}{closest(name, declared)}"
            )
        values: dict[str, Any] = {
            name: checked(kebab(name), value, declared[name], default_of(StreamConfig, name))
            for name, value in given.items()
        }
        self._settings = replace(StreamConfig(), **values)
        self._partition_by = partition_by
        self._seed = seed

    @property
    def num_partitions(self) -> int:
        """Number of clients."""
        return self._settings.clients

    def load_partition(self, partition_id: int) -> Dataset:
        """Return all rows of a client, in the order of its rounds.

        Raises
        ------
        ConfigError
            There is no such partition, or ``window`` or ``overlap`` does not fit the classes.
        DataError
            The data set has no such column of labels.
        StreamError
            The data set has too few rows of a class, for this client or for another one.
        """
        return self.dataset.select(np.concatenate(self._stream(partition_id).chunks))

    def load_chunk(self, partition_id: int, round_number: int) -> Dataset:
        """Return the rows of a client in one round, from 1.

        Raises
        ------
        ConfigError
            There is no such round.
        FedkaceError
            As :meth:`load_partition`.
        """
        if not 1 <= round_number <= self._settings.rounds:
            raise ConfigError(f"round_number = {round_number}: must be between 1 and rounds = {self._settings.rounds}")
        return self.dataset.select(self._stream(partition_id).chunks[round_number - 1])

    def _stream(self, partition_id: int) -> ClientStream:
        if not 0 <= partition_id < self.num_partitions:
            raise ConfigError(f"partition_id = {partition_id}: must be between 0 and {self.num_partitions - 1}")
        return self._streams[partition_id]

    @cached_property
    def _streams(self) -> list[ClientStream]:
        """The streams of all clients, so that each is checked before the first round of any."""
        ids = self._rows_by_class()
        return [client_stream(client, self._seed, ids, self._settings) for client in range(self.num_partitions)]

    def _rows_by_class(self) -> list[npt.NDArray[np.int64]]:
        features = self.dataset.features
        if self._partition_by not in features:
            raise DataError(
                f"partition_by = {self._partition_by!r}: the data set has the columns {', '.join(features)}"
            )
        names = getattr(features[self._partition_by], "names", None)
        values = np.asarray(self.dataset[self._partition_by])
        classes = np.unique(values) if names is None else range(len(names))
        return [np.flatnonzero(values == label).astype(np.int64) for label in classes]
