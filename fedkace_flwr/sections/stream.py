"""Keys of the stream."""

from dataclasses import dataclass

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class StreamConfig:
    """Stream."""

    clients: int = key(10, "Number of clients K.", low=1)
    rounds: int = key(15, "Number of rounds T.", low=1)
    window: int = key(2, "Number of classes in a client's chunk, W.", unit="classes", low=1)
    overlap: int = key(
        1, "Number of classes that two consecutive chunks share, O; between 0 and `window`.", unit="classes", low=0
    )
    samples_per_class: int = key(25, "Number of new samples of each class in a chunk, n.", unit="samples", low=1)
