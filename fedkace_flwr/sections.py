"""The configuration's own sections: every key that is not a method's."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import key


@dataclass(frozen=True)
class DataConfig:
    """Data set."""

    dataset: str = key(
        "digits",
        "Data set: `digits` (bundled with scikit-learn), `cifar100`, `imagenet100`, or `folder` (any image folder with train/ and val/ or test/).",
    )
    data_dir: str = key(
        "data",
        "Where the original files lie or are downloaded to: the folder that holds `cifar-100-python/` (cifar100), ILSVRC2012's `train/` (imagenet100), or `train/` and `val/` or `test/` (folder). Relative to the working directory of the process.",
        affects="place",
    )
    cache_dir: str = key(
        "",
        "Where the prepared, memory-mapped arrays are kept. Empty: `$FEDKACE_CACHE_DIR`, else `~/.cache/fedkace_flwr`.",
        affects="place",
    )
    num_classes: int = key(0, "Keep the first so many classes; 0 keeps all.", unit="classes", low=0)
    image_size: int = key(
        0,
        "Height and width of the images. 0: the data set's own (digits 8, cifar100 32, imagenet100 224, folder 64); an inbox needs one.",
        unit="pixels",
        low=0,
        high=1024,
    )
    normalise: bool = key(
        True, "Reading: subtract the data set's mean and divide by its standard deviation, per channel."
    )
    test_per_class: int = key(
        0,
        "Each client draws a fixed test set of so many images per class; 0 uses the whole test split (the paper draws 100 of 300 on ImageNet100).",
        unit="images",
        low=0,
    )
    data_source: Literal["stream", "inbox"] = key(
        "stream",
        "Where clients' samples come from: a `stream` drawn from the data set (simulation), or an `inbox` on each device, into which files are dropped (docs/edge-data.md).",
    )
    class_names: str = key(
        "",
        "With `data-source = inbox`: the agreed classes, comma-separated, in the order of their labels; `dataset` and `num-classes` do not count there.",
    )
    inbox_bound: int = key(
        10000,
        "Most samples that a round takes from an inbox. A file is never split, and one that holds more is rejected.",
        unit="samples",
        low=1,
    )
    inbox_after: Literal["keep", "delete"] = key(
        "keep",
        "What becomes of an inbox's files once they are learned: moved to `done/` (`keep`), or `delete`d.",
        affects="place",
    )

    def classes(self) -> tuple[str, ...]:
        """The names in ``class-names``."""
        return tuple(name.strip() for name in self.class_names.split(","))


@dataclass(frozen=True)
class StreamConfig:
    """Stream."""

    clients: int = key(10, "Number of clients K.", low=1)
    rounds: int = key(15, "Number of rounds T.", low=1)
    window: int = key(2, "Classes in a client's chunk, W.", unit="classes", low=1)
    overlap: int = key(1, "Classes that two adjacent chunks share, O, between 0 and `window`.", unit="classes", low=0)
    samples_per_class: int = key(25, "New samples of each class in a chunk, n.", unit="samples", low=1)


@dataclass(frozen=True)
class ModelConfig:
    """Model."""

    width: int = key(8, "Channels of ResNet-18's first stage (paper: 16 for CIFAR-100, 64 for ImageNet100).", low=1)
    stem: Literal["auto", "cifar", "imagenet"] = key(
        "auto",
        "First layers: `cifar` (3x3, stride 1), `imagenet` (7x7, stride 2, max-pool); `auto` takes `imagenet` from 112 pixels up.",
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Local training."""

    epochs: int = key(5, "Local epochs per round, J.", unit="epochs", low=1)
    batch_size: int = key(32, "Samples per step.", unit="samples", low=2)
    learning_rate: float = key(
        0.01, "Learning rate of AdamW in the first epoch; falls to 0 along a cosine over the round's epochs.", above=0
    )
    weight_decay: float = key(0.001, "Weight decay of AdamW.", low=0)
    batching: Literal["union", "paired"] = key(
        "union",
        "Reading: `union` passes once over chunk and buffer shuffled together; `paired` takes `batch-size` of each in every step and cycles the shorter side.",
    )


@dataclass(frozen=True)
class BufferConfig:
    """Buffer."""

    capacity: int = key(60, "Buffer capacity M of each client; at least the number of classes.", unit="samples", low=1)


@dataclass(frozen=True)
class PrivacyConfig:
    """Privacy."""

    dp: Literal["none", "local", "central"] = key(
        "none",
        "Differential privacy for the models of methods whose aggregation is a mean (docs/privacy.md): each client clips and noises its update (`local`), or clips it and the server noises the mean (`central`). Clients then weigh alike and `report-classes` is off.",
    )
    dp_clip: float = key(
        1.0, "With `dp`: an update (local model less the model that was sent) is scaled down to this norm.", above=0
    )
    dp_noise: float = key(
        1.0,
        "With `dp`: standard deviation of the noise on each weight of a client's update (`local`) or of the sum of updates (`central`), in units of `dp-clip`. 0 clips and gives no privacy.",
        low=0,
    )
    dp_delta: float = key(1e-05, "With `dp`: the delta for which epsilon is recorded.", above=0, high=1)
    dp_seeded: bool = key(
        False,
        "With `dp`: draw the noise from `seed`, so that a study can be repeated. Who knows the seed can take the noise away: no privacy.",
    )
    statistics: Literal["shared", "local"] = key(
        "shared",
        "Batch-norm running statistics: averaged like weights (`shared`; with `dp`, clipped and noised with them), or never sent, each client keeping its own (`local`). For methods whose aggregation is a mean.",
    )
    secagg: bool = key(
        False,
        "Secure aggregation (SecAgg+) for methods whose aggregation is a mean: the server learns the sum of the updates and no single one (docs/privacy.md). Clients weigh alike and `report-classes` is off.",
    )
    secagg_range: float = key(
        8.0,
        "With `secagg`: how far a weight may move in a round; quantised to 2^22 steps from minus to plus this. A client with a larger move is left out.",
        above=0,
    )

    @property
    def hides(self) -> bool:
        """Whether single updates are kept from the server, by noise or by masks."""
        return self.dp != "none" or self.secagg


@dataclass(frozen=True)
class RunConfig:
    """Run."""

    seed: int = key(0, "Seed of everything random.", low=0)
    device: str = key("auto", "Where clients compute: `auto` (a GPU if the worker has one), `cpu`, `cuda` or `cuda:N`.")
    precision: Literal["fp32", "bf16", "auto"] = key(
        "fp32",
        "What networks compute in, parameters and losses aside: `fp32`, `bf16` (autocast), or `auto`: bf16 where the hardware multiplies it. Results differ by rounding.",
    )
    step: Literal["eager", "captured"] = key(
        "eager",
        "How a training step is asked for: operation by operation (`eager`), or `captured`: on a GPU recorded once in a CUDA graph and played back, on a CPU the same step without the recording, with the same results as `eager`. A loss that cannot be recorded trains as with `eager`. The recording has not been run on a GPU yet.",
    )
    threads: int = key(
        1, "CPU threads per worker; 0 leaves PyTorch's own choice.", unit="threads", low=0, affects="place"
    )
    results_dir: str = key(
        "results",
        "Where the run's folder is made. Relative to the working directory of the server process.",
        affects="place",
    )
    run_name: str = key(
        "", "Name of the run's folder in `results-dir`; empty: `run-` and Flower's run id.", affects="place"
    )
    resume: bool = key(
        False,
        "Go on with the run of this `run-name` after its last finished round; one that is not there is begun.",
        affects="place",
    )
    state_dir: str = key(
        "",
        "Where clients keep their state; empty: `clients/` in the run's folder. A client's `--node-config state-dir=...` goes before it.",
        affects="place",
    )
    keep_models: Literal["auto", "always", "never"] = key(
        "auto",
        "Whether a client keeps what it answers by as `models-ROUND.npz` in its state folder, for `python -m fedkace_flwr.inference.predict`: `auto` does where data arrive in an inbox, as on a machine of their own. `centralized` has no model to keep.",
        affects="place",
    )
    inference: Literal["auto", "global", "local"] = key(
        "auto",
        "Which model answers: `auto` (FedKACE switches, the others' own rule, mostly the global model), or `global` or `local` throughout (ablations AS2, AS3).",
    )
    evaluate: Literal["inference", "both"] = key(
        "inference", "What a client tests each round: its inference model alone, or local and global model (`both`)."
    )
    diagnostics: bool = key(
        True, "Record client drift and the condition number of each buffer's kernel matrix (for buffers up to 2000)."
    )
    report_classes: bool = key(
        True, "Clients report the class histogram of their buffer; switch off where that must not leave the device."
    )
    tensorboard: bool = key(
        False,
        "Also write each round as TensorBoard events beside `rounds.jsonl`; needs the extra `tensorboard`.",
        affects="place",
    )
    quorum: float = key(
        0.5,
        "Share of the clients whose valid replies each phase of a round needs; a client that sits a round out counts.",
        above=0,
        high=1,
    )
    below_quorum: Literal["stop", "skip", "repeat"] = key(
        "stop",
        "What a phase with fewer valid replies does: `stop` ends the run; `skip` leaves the global model as it is and goes on, and the round's record says so; `repeat` asks again, and clients that have trained answer from their store.",
        affects="waiting",
    )
    below_quorum_limit: int = key(
        5,
        "So many rounds (`skip`) or askings of one phase (`repeat`) in a row below the quorum end the run; `resume` goes on with it.",
        low=1,
        affects="waiting",
    )
    norm_bound: float = key(
        10.0,
        "A local model that has moved from what its client was sent more than so many times as far as the round's median is left out, and FedCBDR's features so much larger than the others' are; at least 1, 0 switches it off.",
        low=0,
    )
    max_examples: int = key(
        0,
        "Most samples that a client can have trained on in a round; a reply that claims more is left out. 0: `window` x `samples-per-class`.",
        unit="samples",
        low=0,
    )
    deadline: float = key(
        7200.0, "Longest wait for the replies of one phase of a round.", unit="seconds", above=0, affects="waiting"
    )
    probe: float = key(
        120.0,
        "Silence after which a client is asked whether its machine is at work on it, and then again from time to time; one that is not, twice in a row, is sent its message once more. 0: never. Simulations lose no messages and do not ask.",
        unit="seconds",
        low=0,
        affects="waiting",
    )
    join_deadline: float = key(
        300.0, "Longest wait for the SuperNodes at the start.", unit="seconds", above=0, affects="waiting"
    )
