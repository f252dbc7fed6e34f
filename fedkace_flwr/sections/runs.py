"""Keys of everything but data and stream: what is trained and how, which replies count, and how a run is carried out."""

from dataclasses import dataclass
from typing import Literal

from fedkace_flwr.keys import ANY, Number, key, word_of

TIMM = "timm:"
"""What the name of a network of timm begins with."""


@dataclass(frozen=True)
class ModelConfig:
    """Model."""

    network: str = key(
        "resnet18",
        "Network: `resnet18` (the paper's), `mobilenet-v3-small`, `efficientnet-b0`, `vit` (a small vision transformer), `cnn` (two convolutions, for devices), `mlp` (two hidden layers, for tables and samples of any other shape), `cnn1d` (three convolutions, for series), `timm:NAME` (a classification model of timm, whose pictures are normalised as published; needs the extra `timm`), or one of another package (docs/extend.md).",
    )
    width: int = key(
        8,
        "Channels of the network's first layers; all others are in proportion. `resnet18`: 16 (CIFAR-100) and 64 (ImageNet100) in the paper. Published: `mobilenet-v3-small` 16, `efficientnet-b0` 32, both with at least 8 in each layer; `cnn` 32. `vit` has 8 x `width` throughout, `mlp` 4 x `width` units in each layer (published 50), `cnn1d` 128 where published. Networks of timm have their own.",
        low=1,
        high=256,
    )
    stem: Literal["auto", "cifar", "imagenet"] = key(
        "auto",
        "First layers of the network: `cifar`, for small images, or `imagenet`, which `auto` uses from 112 pixels on. `resnet18`: 3x3 with stride 1, or 7x7 with stride 2 and max-pooling. `mobilenet-v3-small`, `efficientnet-b0`: stride 1 or 2 in the first two strided layers. `vit`: patches of an eighth of the image's side, or of 16 pixels. `cnn`, `mlp` and `cnn1d` have no `imagenet`. Networks of timm have their own.",
    )
    weights_file: str = key(
        "",
        "File with the weights that the network starts from, apart from the output layer: a state dict as `.safetensors`, `.pth` or `.pt`, with the names of this package, of torchvision or of timm. With `trainable = lora`, also adapters, with the names of this package or of peft, alone or with the rest. The server reads it; clients do only with `trainable` other than `all`, with `centralized` and in simulated attacks.",
    )
    pretrained: bool = key(
        False,
        "Start from the publisher's weights, apart from the output layer: those of timm, or torchvision's ImageNet weights for `resnet18`, `mobilenet-v3-small` and `efficientnet-b0` at their published `width` and with `stem = imagenet`, with ImageNet's normalisation. A `weights-file` may add adapters alone. Taken from the cache, or downloaded, by those who would read a `weights-file`.",
    )
    output_layer: Literal["learned", "simplex"] = key(
        "learned",
        "Last layer of the network: `learned`, or fixed to a `simplex` drawn from `seed`, the same for all clients, with the same angle between any two classes. It needs at least as many features (`resnet18`: 8 x `width`) as there are classes.",
    )
    trainable: Literal["all", "output", "norm", "lora"] = key(
        "all",
        "What trains: `all`, the `output` layer alone, or also the scales and shifts of normalisation layers (`norm`) or low-rank adapters of linear layers, convolutions and attention (`lora`). The rest is frozen: each client takes it from `seed`, `weights-file` or `pretrained`, and is sent it once if its digest is not the server's.",
    )
    lora_rank: int = key(4, "With `trainable = lora`: rank of the adapters.", low=1, high=1024)

    @property
    def of_timm(self) -> bool:
        """Whether the network is one of timm."""
        return self.network.startswith(TIMM)


@dataclass(frozen=True)
class TrainingConfig:
    """Local training."""

    epochs: int = key(5, "Local epochs per round, J.", unit="epochs", low=1, high=10_000, living=True)
    batch_size: int = key(32, "Samples per step.", unit="samples", low=2, living=True)
    optimiser: str = key(
        "adamw",
        "Optimiser of local training, which starts anew in each round: `adamw`; `sgd`, plain or with momentum; or `nesterov`, SGD with Nesterov's momentum.",
        words={
            "adamw": (),
            "sgd": (Number("momentum", 0.0, low=0, high=0.999),),
            "nesterov": (Number("momentum", 0.9, above=0, high=0.999),),
        },
    )
    learning_rate: float = key(
        0.01,
        "Learning rate in the first epoch; follows a cosine towards 0 over the round's epochs.",
        above=0,
        living=True,
    )
    weight_decay: float = key(
        0.001,
        "Weight decay: with `adamw` decoupled, so that each step multiplies the weights by 1 - `learning-rate` x `weight-decay`; with `sgd` and `nesterov` as in PyTorch, where `weight-decay` times the weights is added to the gradient.",
        low=0,
        living=True,
    )
    batching: Literal["union", "paired", "random-replay"] = key(
        "union",
        "Reading: `union` passes once over chunk and buffer shuffled together; `paired` takes `batch-size` samples of each in every step and cycles through the smaller one; `random-replay` passes once over the chunk and adds as many random draws from the buffer to every step.",
        living=True,
    )
    augment: Literal["none", "flip-shift", "auto"] = key(
        "none",
        "Random changes of training images, drawn anew for each epoch: `flip-shift` mirrors half of the images and shifts each by up to an eighth of its side, repeating its edge; `auto` does so if images may be mirrored (`mirroring`).",
        living=True,
    )
    logit_adjustment: float = key(
        0.0,
        "In training, adds this many times the logarithm of each class's number of samples in chunk and buffer to its logit; 1 is balanced softmax, 0 plain softmax.",
        low=0,
        high=10,
        living=True,
    )


@dataclass(frozen=True)
class BufferConfig:
    """Buffer."""

    capacity: int = key(
        60, "Buffer capacity M of each client; at least the number of classes.", unit="samples", low=1, high=100_000
    )


AVERAGING = ("mean", "fading", "prequential")
"""Values of ``predict-with`` with which a client predicts by several models together."""


@dataclass(frozen=True)
class AnswerConfig:
    """Answers."""

    predict_with: Literal["auto", "global", "local", "mean", "fading", "prequential"] = key(
        "auto",
        "Which model a client predicts with: `auto` follows the method (FedKACE switches; most others use the global model); `global` and `local` always use that model (ablations AS2, AS3); `mean` averages the probabilities of both; `fading` gives the local model twice its weight in the first round, an excess that halves with each further one; `prequential` begins like `fading`, and then weights the models by how well they predict each new chunk before training on it.",
    )
    evaluate: Literal["inference", "both"] = key(
        "inference",
        "Which models a client tests each round: those that it predicts with, or the local and the global one as well (`both`), these also with every class as a possible answer, not only those that the client has met.",
    )
    recalibrate_batchnorm: bool = key(
        False,
        "Whether a client replaces the batch-norm statistics of every model that it receives by those of its own images, before it uses the model.",
    )
    classifier: Literal["trained", "discriminant", "both", "fading"] = key(
        "trained",
        "Output layer by which a model predicts: the `trained` one; a `discriminant` fitted to the features of the client's own images each time a model is trained or received; the mean of `both`; or `fading`, a mean in which the discriminant's weight is 1 in the first round, halves with each further one, and ends below one percent. The models that are sent keep the trained one.",
    )
    test_time_augmentation: Literal["none", "mirrored", "auto"] = key(
        "none",
        "Whether a received model predicts by the image alone (`none`), or also, as one more model in the mean of probabilities, by its `mirrored` image; `auto` does so if images may be mirrored (`mirroring`).",
    )

    @property
    def averages(self) -> bool:
        """Whether a client predicts by a mean of the probabilities of all its models."""
        return self.predict_with in AVERAGING


DELTA = 1e-05
"""The delta for which epsilon is recorded: well below one in the number of clients of any federation that we know of."""

SECAGG_RANGE = 8.0
"""With ``secagg``, the largest change of a weight in a round, far beyond what training does with batch normalisation.

The range from minus to plus this value is quantised to 2^22 steps. A client with a larger change is left out.
"""

SMALLEST_SUM = 3
"""With ``secagg``, the fewest updates that are added up: from a sum of two, each client learns the other's."""


@dataclass(frozen=True)
class PrivacyConfig:
    """Privacy."""

    dp: Literal["none", "local", "central"] = key(
        "none",
        "Differential privacy for methods that aggregate by a mean (docs/privacy.md): clients clip their updates, and noise is added by each client (`local`) or by the server to the mean (`central`). All clients then have equal weight, and `report-classes` is off.",
    )
    dp_clip: float = key(
        1.0, "With `dp`: an update (the local model minus the model sent) is scaled down to at most this norm.", above=0
    )
    dp_noise: float = key(
        1.0,
        "With `dp`: standard deviation of the noise on each weight of a client's update (`local`) or of the sum of updates (`central`), in units of `dp-clip`. 0 only clips and gives no privacy.",
        low=0,
    )
    dp_seeded: bool = key(
        False,
        "With `dp`: derive the noise from `seed`, so that a study can be repeated. This gives no privacy: anyone who knows the seed can remove the noise.",
    )
    batchnorm_statistics: Literal["shared", "local"] = key(
        "shared",
        "Batch-norm running statistics: `shared` averages them like weights (with `dp`, clipped and noised like weights); `local` never sends them, and each client keeps its own. `local` is for methods that aggregate by a mean.",
    )
    secagg: bool = key(
        False,
        "Secure aggregation (SecAgg+) for methods that aggregate by a mean: the server learns the sum of the updates but no single update. Otherwise as `dp`.",
    )

    @property
    def hides(self) -> bool:
        """Whether noise or masks hide single updates from the server."""
        return self.dp != "none" or self.secagg


@dataclass(frozen=True)
class AggregationConfig:
    """Aggregation."""

    aggregation: str = key(
        "mean",
        "How the server aggregates local models, for methods whose server takes a mean (docs/robustness.md): the `mean`; the `median` or the `trimmed-mean` of each number; the mean of the models that `multi-krum` chooses; or the `geometric-median`. The number is that of the hostile clients against which the rule protects; 0, the default: a quarter of the round's replies, rounded down.",
        words={
            "mean": (),
            "median": (),
            "trimmed-mean": (Number("hostile", 0, low=0),),
            "multi-krum": (Number("hostile", 0, low=0),),
            "geometric-median": (),
        },
        living=True,
    )
    server_optimiser: str = key(
        "none",
        "How the server moves the parameters of the global model towards what `aggregation` gives, for methods whose server takes a mean: `none` goes all the way; `momentum` (FedAvgM), `adam` (FedAdam) and `yogi` (FedYogi) take a step of Reddi et al. (ICLR 2021, algorithm 2), with their beta1 = 0.9, beta2 = 0.99 and tau = 0.001. The number is the server's learning rate; the defaults are what the publication's tuning chose for most tasks (`momentum`: 1) and for its language tasks (`adam`, `yogi`: 0.01). Batch-norm statistics are aggregated as without it.",
        words={
            "none": (),
            "momentum": (Number("rate", 1.0, above=0),),
            "adam": (Number("rate", 0.01, above=0),),
            "yogi": (Number("rate", 0.01, above=0),),
        },
    )
    defence: Literal["off", "on"] = key(
        "off",
        "With `on`, the server rejects models that work against the others, and scales down layers that moved much farther than honest training moves them (docs/robustness.md): for deployments whose machines belong to strangers.",
        living=True,
    )

    @property
    def rule(self) -> str:
        """The rule, without its number."""
        return word_of(self, "aggregation")[0]

    @property
    def hostile(self) -> int:
        """Number of hostile clients against which the rule protects; 0 for a quarter of the replies."""
        return int(word_of(self, "aggregation")[1].get("hostile", 0))


@dataclass(frozen=True)
class AttackConfig:
    """Attacks."""

    attack: str = key(
        "none",
        "For studies of robustness, in simulations alone: what hostile clients do, such as `sign-flip`, and by which factor (1) they enlarge it; docs/robustness.md has the list.",
        words={ANY: (Number("scale", 1.0, above=0),)},
    )
    hostile_clients: int = key(
        1, "With an `attack`: number of hostile clients; those with the highest numbers are.", unit="clients", low=1
    )

    @property
    def name(self) -> str:
        """The attack, without its scale."""
        return word_of(self, "attack")[0]

    @property
    def scale(self) -> float:
        """The factor by which hostile clients enlarge what they send."""
        return float(word_of(self, "attack")[1]["scale"])


@dataclass(frozen=True)
class RunConfig:
    """Run."""

    seed: int = key(0, "Seed of all randomness.", low=0)
    device: str = key(
        "auto",
        "Where clients compute: `auto` (an NVIDIA GPU if the worker has one), `cpu`, `cuda` (the first GPU that the worker sees) or `cuda:N`.",
        living=True,
    )
    precision: Literal["fp32", "tf32", "bf16", "auto"] = key(
        "fp32",
        "Precision in which networks compute: `fp32`; `tf32`, in which products on an NVIDIA GPU round their factors to 10 bits, which is faster; `bf16` (autocast); or `auto` (bf16 if the hardware supports it). Parameters and losses stay in fp32.",
        living=True,
    )
    deterministic: bool = key(
        False,
        "On an NVIDIA GPU, which is slower then: compute only with algorithms that give the same bits each time (docs/gpu.md). A run stops at an operation that has none.",
        living=True,
    )
    cuda_graphs: Literal["auto", "off", "on"] = key(
        "auto",
        "Whether a training step is recorded once in a CUDA graph and replayed, or launched operation by operation (`off`); `auto` records on an NVIDIA GPU. On a CPU, `on` runs the same step unrecorded.",
        affects="place",
    )
    threads: int = key(
        1, "CPU threads per worker; 0 uses PyTorch's default.", unit="threads", low=0, high=1024, affects="place"
    )
    results_dir: str = key(
        "results",
        "Folder in which the run's folder is created. Relative to the working directory of the server process.",
        affects="place",
    )
    run_name: str = key(
        "",
        "Name of the run's folder in `results-dir`. Empty: `run-` and Flower's run id.",
        affects="place",
        is_name=True,
    )
    resume: bool = key(
        False,
        "Continue the run of this `run-name` after its last finished round, or start it if it does not exist.",
        affects="place",
    )
    state_dir: str = key(
        "",
        "Folder for the clients' state. Empty: `clients/` in the run's folder. A client's `--node-config state-dir=...` overrides it.",
        affects="place",
    )
    memory: Literal["auto", "keep", "fresh"] = key(
        "auto",
        "What a client of a new run begins with: `keep`, the samples in its buffer and the classes that it has met in the run before, in the same state folder (docs/client-state.md); `fresh`, nothing; `auto` keeps them if data arrives in an inbox.",
    )
    keep_models: Literal["auto", "always", "never"] = key(
        "auto",
        "Whether a client keeps the models that it predicts with in its state folder (docs/inference.md): `auto` keeps them if data arrives in an inbox, and on nodes with a `state-dir` or `models-dir` of their own, as devices have.",
        affects="place",
    )
    diagnostics: bool = key(
        True,
        "Record client drift, the condition number of each buffer's kernel matrix (for buffers of up to 2000 samples), and the accuracy of received models on classes that are new to a client.",
        living=True,
    )
    report_classes: bool = key(
        True,
        "Clients report the class histogram of their buffer and their accuracy on each class. Switch it off if these must not leave the device.",
        living=True,
    )
    tracker: Literal["none", "tensorboard", "mlflow", "wandb"] = key(
        "none",
        "Also show each round in `tensorboard`, `mlflow` or `wandb` (Weights & Biases); needs the extra of that name (docs/trackers.md).",
        affects="place",
    )
    on_alarm: str = key(
        "",
        "Command that the server runs, without a shell, after a round with alarms, which it gets as JSON (docs/living.md). Clients can read it.",
        affects="place",
    )
    quorum: float = key(
        0.5,
        "Share of the clients that must reply validly in each phase of a round; a client that sits the round out counts.",
        above=0,
        high=1,
        living=True,
    )
    below_quorum: str = key(
        "auto",
        "What happens if a phase has too few valid replies: `stop` ends the run; `skip` leaves the global model unchanged, goes on and notes it in the round's record; `repeat` runs the phase again, in which clients that have already trained answer from their store. After so many consecutive rounds (`skip`) or attempts at one phase (`repeat`) the run ends (5; 0: never); `resume` continues it. `auto` is `repeat:0` for inboxes, `stop` otherwise.",
        affects="waiting",
        words={"auto": (), "stop": (), "skip": (Number("limit", 5, low=0),), "repeat": (Number("limit", 5, low=0),)},
    )
    gate: Literal["off", "hold"] = key(
        "off",
        "With `hold`, a new global model is a candidate: devices test it and the accepted one on samples of their own, and one that is worse by more than `gate-tolerance` over all devices is held: everyone keeps the accepted one (docs/living.md).",
        living=True,
    )
    gate_tolerance: float = key(
        0.02,
        "With `gate = hold`: share of all tested samples by which a candidate may be worse.",
        low=0,
        high=1,
        living=True,
    )
    past_models: int = key(
        1000,
        "Megabytes that the server keeps of past models, from which `fedkace rollback` goes on, with `dataset = inbox` or `gate = hold`; 0: none.",
        unit="MB",
        low=0,
        affects="place",
    )
    deadline: float = key(
        7200.0, "Maximum wait for the replies of one phase of a round.", unit="seconds", above=0, affects="waiting"
    )
    probe: float = key(
        120.0,
        "Silence after which the server asks a client's machine whether it is working on the message; if the answer is no twice in a row, the message is resent. 0: never, as in simulations.",
        unit="seconds",
        low=0,
        affects="waiting",
    )
    join_deadline: float = key(
        300.0, "Maximum wait for the SuperNodes at the start.", unit="seconds", above=0, affects="waiting"
    )
    away_after: float = key(
        900.0,
        "On real machines: time without contact after which a client counts as away: it is warned of once and not waited for, until it is back.",
        unit="seconds",
        above=0,
        affects="waiting",
    )
    round_interval: float = key(
        0.0,
        "With `dataset = inbox`: shortest time from the start of a round to the start of the next. While too few samples have arrived, devices are asked in this interval, at most every ten seconds.",
        unit="seconds",
        low=0,
        high=1e7,
        affects="waiting",
    )
    round_samples: int = key(
        1,
        "With `dataset = inbox`: number of new labelled samples that the devices together must have before a round starts. 0: rounds do not wait for samples.",
        unit="samples",
        low=0,
        affects="waiting",
    )
    metrics_port: int = key(
        0,
        "Port of the server's machine, at 127.0.0.1 alone, where Prometheus can read the state of the run and of its clients (docs/living.md); 0: none. Needs the extra `metrics`.",
        low=0,
        high=65535,
        affects="place",
    )
