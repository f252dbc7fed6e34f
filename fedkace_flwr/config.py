"""The configuration: one frozen tree, parsed once from Flower's flat run config.

Every key is declared here and nowhere else: its default, type, range, unit and meaning. A key's name in run
configs, studies and records is the field's name in kebab-case. ``docs/configuration.md`` is generated from
this module (``python -m fedkace_flwr.config``).
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from fedkace_flwr.coalitions import LARGEST_EXACT
from fedkace_flwr.errors import ConfigError

Scalar = bool | int | float | str

LARGEST_SUM = 1000


@dataclass(frozen=True)
class Key:
    """What a configuration key means and which values it takes."""

    meaning: str
    unit: str = ""
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def range_text(self) -> str:
        """The allowed values in words, empty where every value of the type is allowed."""
        if self.choices:
            return ", ".join(f"`{choice}`" for choice in self.choices)
        low = f">= {self.low:g}" if self.low is not None else f"> {self.above:g}" if self.above is not None else ""
        high = f"<= {self.high:g}" if self.high is not None else ""
        return " and ".join(part for part in (low, high) if part)

    def allows(self, value: Scalar) -> bool:
        """Whether ``value``, already of the right type, lies in the range."""
        if self.choices:
            return value in self.choices
        if isinstance(value, str | bool):
            return True
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )


def _key(default: Any, meaning: str, **limits: Any) -> Any:
    return field(default=default, metadata={"key": Key(meaning, **limits)})


@dataclass(frozen=True)
class DataConfig:
    """Data set."""

    dataset: str = _key(
        "digits",
        "Data set: `digits` (bundled with scikit-learn), `cifar100`, `imagenet100`, or `folder` (any image folder with train/ and val/ or test/).",
    )
    data_dir: str = _key(
        "data",
        "Where the original files lie or are downloaded to: the folder that holds `cifar-100-python/` (cifar100), ILSVRC2012's `train/` (imagenet100), or `train/` and `val/` or `test/` (folder). Relative to the working directory of the process.",
    )
    cache_dir: str = _key(
        "",
        "Where the prepared, memory-mapped arrays are kept. Empty: `$FEDKACE_CACHE_DIR`, else `~/.cache/fedkace_flwr`.",
    )
    num_classes: int = _key(0, "Keep the first so many classes; 0 keeps all.", unit="classes", low=0)
    image_size: int = _key(
        0,
        "Height and width of the images. 0: the data set's own (digits 8, cifar100 32, imagenet100 224, folder 64); an inbox needs one.",
        unit="pixels",
        low=0,
        high=1024,
    )
    normalise: bool = _key(
        True, "Reading: subtract the data set's mean and divide by its standard deviation, per channel."
    )
    test_per_class: int = _key(
        0,
        "Each client draws a fixed test set of so many images per class; 0 uses the whole test split (the paper draws 100 of 300 on ImageNet100).",
        unit="images",
        low=0,
    )
    data_source: str = _key(
        "stream",
        "Where clients' samples come from: a `stream` drawn from the data set (simulation), or an `inbox` on each device, into which files are dropped (docs/edge-data.md).",
        choices=("stream", "inbox"),
    )
    class_names: str = _key(
        "",
        "With `data-source = inbox`: the agreed classes, comma-separated, in the order of their labels; `dataset` and `num-classes` do not count there.",
    )
    inbox_bound: int = _key(
        10_000,
        "Most samples that a round takes from an inbox. A file is never split, and one that holds more is rejected.",
        unit="samples",
        low=1,
    )
    inbox_after: str = _key(
        "keep",
        "What becomes of an inbox's files once they are learned: moved to `done/` (`keep`), or `delete`d.",
        choices=("keep", "delete"),
    )

    def classes(self) -> tuple[str, ...]:
        """The names in ``class-names``."""
        return tuple(name.strip() for name in self.class_names.split(","))


@dataclass(frozen=True)
class StreamConfig:
    """Stream."""

    clients: int = _key(10, "Number of clients K.", low=1)
    rounds: int = _key(15, "Number of rounds T.", low=1)
    window: int = _key(2, "Classes in a client's chunk, W.", unit="classes", low=1)
    overlap: int = _key(1, "Classes that two adjacent chunks share, O, between 0 and `window`.", unit="classes", low=0)
    samples_per_class: int = _key(25, "New samples of each class in a chunk, n.", unit="samples", low=1)


@dataclass(frozen=True)
class ModelConfig:
    """Model."""

    width: int = _key(8, "Channels of ResNet-18's first stage (paper: 16 for CIFAR-100, 64 for ImageNet100).", low=1)
    stem: str = _key(
        "auto",
        "First layers: `cifar` (3x3, stride 1), `imagenet` (7x7, stride 2, max-pool); `auto` takes `imagenet` from 112 pixels up.",
        choices=("auto", "cifar", "imagenet"),
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Local training."""

    epochs: int = _key(5, "Local epochs per round, J.", unit="epochs", low=1)
    batch_size: int = _key(32, "Samples per step.", unit="samples", low=2)
    learning_rate: float = _key(
        0.01, "Learning rate of AdamW in the first epoch; falls to 0 along a cosine over the round's epochs.", above=0
    )
    weight_decay: float = _key(0.001, "Weight decay of AdamW.", low=0)
    batching: str = _key(
        "union",
        "Reading: `union` passes once over chunk and buffer shuffled together; `paired` takes `batch-size` of each in every step and cycles the shorter side.",
        choices=("union", "paired"),
    )


@dataclass(frozen=True)
class ReplayConfig:
    """Gradient-balanced replay."""

    gradient_norm: str = _key(
        "sum",
        "Reading: gradients of the losses summed over each set (`sum`, the literal equations) or averaged per sample (`mean`).",
        choices=("sum", "mean"),
    )
    gradient_bias: bool = _key(False, "Reading: whether the output layer's bias takes part in its gradient norm.")
    lambda_max: float = _key(1e4, "Reading: the replay weight is clipped to [0, lambda-max].", above=0)
    replay_weight: str = _key(
        "balanced",
        "Weight of the replay loss: by gradient balance, or 1 throughout (ablation AS4).",
        choices=("balanced", "one"),
    )
    replay_gradient: str = _key(
        "output",
        "Whose gradient the balance compares: the output layer's, or the whole model's at two more backward passes (ablation AS5).",
        choices=("output", "full"),
    )


@dataclass(frozen=True)
class BufferConfig:
    """Buffer."""

    capacity: int = _key(60, "Buffer capacity M of each client; at least the number of classes.", unit="samples", low=1)
    self_distance: str = _key(
        "include",
        "Reading: whether a buffered sample counts as its own nearest neighbour (`include`: its diversity is 0) or not (`exclude`).",
        choices=("include", "exclude"),
    )
    leftover: str = _key(
        "drop",
        "Reading: places left by floor(M / classes) and by classes with few samples stay empty (`drop`) or go to the other classes (`fill`).",
        choices=("drop", "fill"),
    )
    selection: str = _key(
        "hbms",
        "FedKACE's buffer: both stages (`hbms`), sampling by information for every class (`information`, ablation AS6), or drawn at random class by class (`random`, ablation AS7).",
        choices=("hbms", "information", "random"),
    )
    landmarks: int = _key(
        0,
        "Score against so many uniformly drawn buffer samples instead of the whole buffer where the buffer is larger; 0: always the whole buffer.",
        unit="samples",
        low=0,
    )


@dataclass(frozen=True)
class SwitchConfig:
    """Inference switch."""

    inference: str = _key(
        "auto",
        "Which model answers: `auto` (FedKACE switches, the others' own rule, mostly the global model), or `global` or `local` throughout (ablations AS2, AS3).",
        choices=("auto", "global", "local"),
    )
    aggregation: str = _key(
        "mean",
        "FedKACE's server: the mean of the local models, or `none`, where each client keeps its own (ablation LKC).",
        choices=("mean", "none"),
    )

    patience: int = _key(
        2, "Reading: consecutive rounds in which the gap must shrink before a client switches.", unit="rounds", low=1
    )


@dataclass(frozen=True)
class RefedConfig:
    """Re-Fed."""

    refed_lambda: float = _key(
        0.5, "Inferred: how local the informative model is; 1 ignores the global model.", above=0, high=1
    )
    refed_steps: int = _key(5, "Inferred: steps of the informative model, s.", unit="steps", low=1)
    refed_learning_rate: float = _key(0.01, "Inferred: step size of the informative model.", above=0)
    refed_reduction: str = _key(
        "mean", "Inferred: the informative model follows the mean or the sum of the gradients.", choices=("mean", "sum")
    )
    refed_gradient: str = _key(
        "full",
        "Inferred: gradient norms over all parameters, or the last layer's alone.",
        choices=("full", "last-layer"),
    )
    refed_power: int = _key(1, "Inferred: gradient norms as they are (1) or squared (2).", low=1, high=2)
    refed_start: str = _key(
        "global",
        "Inferred: the informative model starts as the global model that pulls it, the round's local model (`local`), or as it ended the last time (`persistent`).",
        choices=("global", "local", "persistent"),
    )
    refed_anchor: str = _key(
        "current",
        "Inferred: score when the round's global model has come, or (`previous`) right after local training, the global model before it in the other's place.",
        choices=("current", "previous"),
    )


@dataclass(frozen=True)
class OfclConfig:
    """OFCL."""

    ofcl_views: str = _key(
        "per-sample",
        "Inferred: the 12 views draw their parameters for each image, or once for all as the published code does.",
        choices=("per-sample", "per-batch"),
    )
    ofcl_rescore: str = _key(
        "current", "Inferred: score the chunk's classes each round, or all classes.", choices=("current", "all")
    )
    ofcl_merge: str = _key(
        "global",
        "Inferred: a client starts its round as the global model, or half-way from it to its own last local model (`half`, the published code's).",
        choices=("global", "half"),
    )
    ofcl_aggregation: str = _key(
        "mean",
        "Inferred: the mean of the local models, or (`class-mean`, the published code's) the mean of one model per class, half-way to the global model before; for it clients report the class counts of their chunks, whatever `report-classes` says.",
        choices=("mean", "class-mean"),
    )


@dataclass(frozen=True)
class FedcbdrConfig:
    """FedCBDR."""

    fedcbdr_tau_old: float = _key(0.9, "Temperature of the old classes' logits.", above=0)
    fedcbdr_tau_new: float = _key(1.1, "Temperature of the chunk's classes' logits.", above=0)
    fedcbdr_weight_old: float = _key(1.1, "Weight of the buffered samples' loss.", low=0)
    fedcbdr_weight_new: float = _key(0.9, "Weight of the chunk's loss.", low=0)
    fedcbdr_new_columns: str = _key(
        "chunk",
        "Inferred: new classes are those of the chunk, or only those never met before (`novel`).",
        choices=("chunk", "novel"),
    )
    fedcbdr_temperatures: str = _key(
        "paper",
        "Inferred: logits scaled by class, old and new samples averaged apart (`paper`), or scaled again by the sample's origin and averaged once (`published-code`).",
        choices=("paper", "published-code"),
    )
    fedcbdr_scores: str = _key(
        "joint",
        "Inferred: leverage from one SVD of all clients' features, each client's rotation taken off (`joint`), or from an SVD for each client with the rotation left on, so that only a client's total is right (`published-code`).",
        choices=("joint", "published-code"),
    )
    fedcbdr_balanced: bool = _key(
        True, "Inferred: draw class by class with equal quotas; false draws over all samples of a client."
    )
    fedcbdr_replacement: bool = _key(
        False,
        "Inferred: draw with replacement, as the paper does; a sample drawn twice is kept once, so that the buffer holds fewer than M.",
    )


@dataclass(frozen=True)
class TfclConfig:
    """TFCL."""

    tfcl_label_weight: float = _key(0.9, "Weight of the label loss beside distillation, on both sides.", low=0, high=1)
    tfcl_temperature: float = _key(5.0, "Temperature of distillation.", above=0)
    tfcl_server_epochs: int = _key(20, "Epochs of the server's network per round.", unit="epochs", low=1)
    tfcl_pick_learning_rate: float = _key(1e-4, "Adam's learning rate for the pick mask.", above=0)
    tfcl_loss: str = _key(
        "cross-entropy", "Inferred: label loss; `bce` is the published code's.", choices=("cross-entropy", "bce")
    )
    tfcl_inference: str = _key(
        "latest",
        "Inferred: answer by the latest sub-model, or by the most confident of all (`most-confident`).",
        choices=("latest", "most-confident"),
    )
    tfcl_head: str = _key(
        "fresh",
        "Inferred: a new sub-model's output layer starts from the run's initial weights as published, or as it was at the end of the round before (`copy`).",
        choices=("fresh", "copy"),
    )
    tfcl_prune: str = _key(
        "within-round",
        "Inferred: a sub-model is pruned to its share in the round that opens it, or as the published code does not before its second (`literal`): with one round each, the first claims all weights and no other gets any.",
        choices=("within-round", "literal"),
    )
    tfcl_trace: str = _key(
        "round",
        "Inferred: each round opens a sub-model, or a chunk of exactly the classes of an earlier one goes on with that one's (`class-set`).",
        choices=("round", "class-set"),
    )
    tfcl_group: str = _key(
        "round",
        "Inferred: one network at the server for all clients of a round, or one for each group of clients whose chunks' classes overlap (`class-overlap`).",
        choices=("round", "class-overlap"),
    )
    tfcl_group_jaccard: float = _key(
        0.5,
        "Inferred: from which share of common classes, of all classes of both chunks, on two clients are of one group with `class-overlap`.",
        low=0,
        high=1,
    )


@dataclass(frozen=True)
class DcfclConfig:
    """DCFCL."""

    dcfcl_epsilon: float = _key(0.2, "Weight of model similarity beside update similarity.", low=0)
    dcfcl_lambda: float = _key(0.2, "Inferred: weight of distillation from the model of the round before.", low=0)
    dcfcl_temperature: float = _key(2.0, "Temperature of distillation.", above=0)
    dcfcl_batch_norm: str = _key(
        "mean",
        "Inferred: batch-norm statistics averaged within a coalition, or each client's own (`local`).",
        choices=("mean", "local"),
    )
    dcfcl_distil_classes: str = _key(
        "old",
        "Inferred: distillation over the classes met before this round, or as in the published code over all outputs (`all`).",
        choices=("old", "all"),
    )
    dcfcl_candidates: str = _key(
        "auto",
        f"Inferred: coalitions to consider. `all` subsets, for at most {LARGEST_EXACT} clients; `merges`: singletons, pairs, unions of two coalitions, and coalitions with one client more or less; `auto`: all where at most {LARGEST_EXACT} clients are left in the game, else merges.",
        choices=("auto", "all", "merges"),
    )


@dataclass(frozen=True)
class CentralizedConfig:
    """Centralized."""

    centralized_every: int = _key(
        1,
        "Train at rounds 1, 1 + m, 1 + 2m, ... and the last; values between are interpolated and marked so.",
        unit="rounds",
        low=1,
    )


@dataclass(frozen=True)
class PrivacyConfig:
    """Privacy."""

    dp: str = _key(
        "none",
        "Differential privacy for the models of methods whose aggregation is a mean (docs/privacy.md): each client clips and noises its update (`local`), or clips it and the server noises the mean (`central`). Clients then weigh alike and `report-classes` is off.",
        choices=("none", "local", "central"),
    )
    dp_clip: float = _key(
        1.0, "With `dp`: an update (local model less the model that was sent) is scaled down to this norm.", above=0
    )
    dp_noise: float = _key(
        1.0,
        "With `dp`: standard deviation of the noise on each weight of a client's update (`local`) or of the sum of updates (`central`), in units of `dp-clip`. 0 clips and gives no privacy.",
        low=0,
    )
    dp_delta: float = _key(1e-5, "With `dp`: the delta for which epsilon is recorded.", above=0, high=1)
    dp_seeded: bool = _key(
        False,
        "With `dp`: draw the noise from `seed`, so that a study can be repeated. Who knows the seed can take the noise away: no privacy.",
    )
    statistics: str = _key(
        "shared",
        "Batch-norm running statistics: averaged like weights (`shared`; with `dp`, clipped and noised with them), or never sent, each client keeping its own (`local`). For methods whose aggregation is a mean.",
        choices=("shared", "local"),
    )
    secagg: bool = _key(
        False,
        "Secure aggregation (SecAgg+) for methods whose aggregation is a mean: the server learns the sum of the updates and no single one (docs/privacy.md). Clients weigh alike and `report-classes` is off.",
    )
    secagg_range: float = _key(
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

    seed: int = _key(0, "Seed of everything random.", low=0)
    device: str = _key(
        "auto", "Where clients compute: `auto` (a GPU if the worker has one), `cpu`, `cuda` or `cuda:N`."
    )
    precision: str = _key(
        "fp32",
        "What networks compute in, parameters and losses aside: `fp32`, `bf16` (autocast), or `auto`: bf16 where the hardware multiplies it. Results differ by rounding.",
        choices=("fp32", "bf16", "auto"),
    )
    step: str = _key(
        "eager",
        "How a training step is asked for: operation by operation (`eager`), or `captured`: on a GPU recorded once in a CUDA graph and played back, on a CPU the same step without the recording, with the same results as `eager`. A loss that cannot be recorded trains as with `eager`. The recording has not been run on a GPU yet.",
        choices=("eager", "captured"),
    )
    clients_together: int = _key(
        1,
        "For GPUs: the inline engine (`python -m experiments.inline`) trains so many clients' networks at once, stacked, where chunks, buffers and losses are alike in size and kind, and the others one at a time. Results differ by rounding. Other engines, and runs with `dp`, `secagg` or `statistics = local`, train one at a time. Has not been run on a GPU yet.",
        unit="clients",
        low=1,
    )
    threads: int = _key(1, "CPU threads per worker; 0 leaves PyTorch's own choice.", unit="threads", low=0)
    results_dir: str = _key(
        "results", "Where the run's folder is made. Relative to the working directory of the server process."
    )
    run_name: str = _key("", "Name of the run's folder in `results-dir`; empty: `run-` and Flower's run id.")
    resume: bool = _key(
        False, "Go on with the run of this `run-name` after its last finished round; one that is not there is begun."
    )
    state_dir: str = _key(
        "",
        "Where clients keep their state; empty: `clients/` in the run's folder. A client's `--node-config state-dir=...` goes before it.",
    )
    keep_models: str = _key(
        "auto",
        "Whether a client keeps what it answers by as `models-ROUND.npz` in its state folder, for `python -m fedkace_flwr.predict`: `auto` does where data arrive in an inbox, as on a machine of their own. `centralized` has no model to keep.",
        choices=("auto", "always", "never"),
    )
    evaluate: str = _key(
        "inference",
        "What a client tests each round: its inference model alone, or local and global model (`both`).",
        choices=("inference", "both"),
    )
    diagnostics: bool = _key(
        True, "Record client drift and the condition number of each buffer's kernel matrix (for buffers up to 2000)."
    )
    report_classes: bool = _key(
        True, "Clients report the class histogram of their buffer; switch off where that must not leave the device."
    )
    tensorboard: bool = _key(
        False, "Also write each round as TensorBoard events beside `rounds.jsonl`; needs the extra `tensorboard`."
    )
    quorum: float = _key(
        0.5,
        "Share of the clients whose valid replies each phase of a round needs; a client that sits a round out counts.",
        above=0,
        high=1,
    )
    below_quorum: str = _key(
        "stop",
        "What a phase with fewer valid replies does: `stop` ends the run; `skip` leaves the global model as it is and goes on, and the round's record says so; `repeat` asks again, and clients that have trained answer from their store.",
        choices=("stop", "skip", "repeat"),
    )
    below_quorum_limit: int = _key(
        5,
        "So many rounds (`skip`) or askings of one phase (`repeat`) in a row below the quorum end the run; `resume` goes on with it.",
        low=1,
    )
    norm_bound: float = _key(
        10.0,
        "A local model that has moved from what its client was sent more than so many times as far as the round's median is left out, and FedCBDR's features so much larger than the others' are; at least 1, 0 switches it off.",
        low=0,
    )
    max_examples: int = _key(
        0,
        "Most samples that a client can have trained on in a round; a reply that claims more is left out. 0: `window` x `samples-per-class`.",
        unit="samples",
        low=0,
    )
    deadline: float = _key(7200.0, "Longest wait for the replies of one phase of a round.", unit="seconds", above=0)
    probe: float = _key(
        120.0,
        "Silence after which a client is asked whether its machine is at work on it, and then again from time to time; one that is not, twice in a row, is sent its message once more. 0: never. Simulations lose no messages and do not ask.",
        unit="seconds",
        low=0,
    )
    join_deadline: float = _key(300.0, "Longest wait for the SuperNodes at the start.", unit="seconds", above=0)


@dataclass(frozen=True)
class Config:
    """The whole configuration.

    Attributes
    ----------
    method : str
        Name of the method, see :mod:`fedkace_flwr.methods`.
    data, stream, model, training, replay, buffer, switch, refed, ofcl, fedcbdr, tfcl, dcfcl, centralized, privacy, run
        The sections.
    """

    method: str = _key("fedkace", "Method, one of the names in `fedkace_flwr/methods.py`.")
    data: DataConfig = field(default_factory=DataConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    switch: SwitchConfig = field(default_factory=SwitchConfig)
    refed: RefedConfig = field(default_factory=RefedConfig)
    ofcl: OfclConfig = field(default_factory=OfclConfig)
    fedcbdr: FedcbdrConfig = field(default_factory=FedcbdrConfig)
    tfcl: TfclConfig = field(default_factory=TfclConfig)
    dcfcl: DcfclConfig = field(default_factory=DcfclConfig)
    centralized: CentralizedConfig = field(default_factory=CentralizedConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Build the tree from flat kebab-case keys; a key left out takes its default.

        Raises
        ------
        ConfigError
            An unknown key, a value of the wrong type or out of range, or two keys that contradict each other.
        """
        known = {_kebab(f.name) for _, f in _leaves()}
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for the keys"
                raise ConfigError(f"unknown key {name} = {values[name]!r}; {hint}")
        sections: dict[str, dict[str, Scalar]] = {}
        for section, f in _leaves():
            name = _kebab(f.name)
            if name in values:
                sections.setdefault(section, {})[f.name] = _checked(name, values[name], f)
        top = sections.pop("", {})
        parts = {name: _SECTIONS[name](**chosen) for name, chosen in sections.items()}
        config = cls(**top, **parts)  # type: ignore[arg-type]
        config._check_together()
        return config

    def flat(self) -> dict[str, Scalar]:
        """Return every key with its value, in the order of declaration."""
        return {_kebab(f.name): getattr(getattr(self, s) if s else self, f.name) for s, f in _leaves()}

    @property
    def largest_chunk(self) -> int:
        """Samples that a client's chunk holds at most."""
        if self.data.data_source == "inbox":
            return self.data.inbox_bound
        return self.stream.window * self.stream.samples_per_class

    @property
    def keeps_models(self) -> bool:
        """Whether clients keep what they answer by: ``keep-models``, its ``auto`` resolved."""
        arrives = self.data.data_source == "inbox"
        return {"always": True, "never": False}.get(self.run.keep_models, arrives)

    def _check_together(self) -> None:
        if self.data.data_source == "inbox":
            self._check_inbox()
        if self.privacy.hides and self.switch.aggregation != "mean":
            raise ConfigError(
                f"aggregation = {self.switch.aggregation!r}: the server keeps each client's model, so dp and secagg "
                "protect nothing; must be 'mean'"
            )
        if self.privacy.secagg and not 3 <= self.stream.clients <= LARGEST_SUM:
            raise ConfigError(
                f"clients = {self.stream.clients}: with secagg = true, must be between 3 (of two, each learns the "
                f"other's update from the sum) and {LARGEST_SUM} (more overflow its 32 bits)"
            )
        stream = self.stream
        if stream.overlap > stream.window:
            raise ConfigError(f"overlap = {stream.overlap}: must be between 0 and window = {stream.window}")
        if stream.window * stream.samples_per_class < 2:
            raise ConfigError(
                f"samples-per-class = {stream.samples_per_class} with window = {stream.window}: "
                "a chunk needs at least 2 samples, for batch normalisation"
            )
        if 0 < self.data.num_classes < stream.window:
            raise ConfigError(f"window = {stream.window}: must be at most num-classes = {self.data.num_classes}")
        if self.buffer.capacity < self.data.num_classes:
            raise ConfigError(
                f"capacity = {self.buffer.capacity}: must be at least the number of classes, {self.data.num_classes}"
            )
        if 0 < self.run.norm_bound < 1:
            raise ConfigError(
                f"norm-bound = {self.run.norm_bound:g}: must be at least 1, or 0 for none; less leaves honest clients out"
            )
        if self.dcfcl.dcfcl_candidates == "all" and stream.clients > LARGEST_EXACT:
            raise ConfigError(
                f"dcfcl-candidates = 'all' with clients = {stream.clients}: there are 2^{stream.clients} coalitions, "
                f"too many beyond {LARGEST_EXACT} clients; use merges or auto"
            )

    def _check_inbox(self) -> None:
        names = self.data.classes()
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise ConfigError(
                f"class-names = {self.data.class_names!r}: with data-source = 'inbox', must be at least two different "
                "names, separated by commas"
            )
        if self.data.image_size < 1:
            raise ConfigError(f"image-size = {self.data.image_size}: with data-source = 'inbox', must be at least 1")
        if self.buffer.capacity < len(names):
            raise ConfigError(
                f"capacity = {self.buffer.capacity}: must be at least the number of classes, {len(names)}"
            )
        if self.privacy.dp_seeded:
            raise ConfigError("dp-seeded = true: for simulation alone; data-source = 'inbox' takes its noise unseeded")
        if self.method == "centralized":
            raise ConfigError("method = 'centralized': keeps all data, so it is for data-source = 'stream' alone")


_SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "stream": StreamConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "replay": ReplayConfig,
    "buffer": BufferConfig,
    "switch": SwitchConfig,
    "refed": RefedConfig,
    "ofcl": OfclConfig,
    "fedcbdr": FedcbdrConfig,
    "tfcl": TfclConfig,
    "dcfcl": DcfclConfig,
    "centralized": CentralizedConfig,
    "privacy": PrivacyConfig,
    "run": RunConfig,
}


def _leaves() -> list[tuple[str, "Field[Any]"]]:
    top = [("", f) for f in fields(Config) if "key" in f.metadata]
    return top + [(name, f) for name, section in _SECTIONS.items() for f in fields(section)]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _checked(name: str, value: object, f: "Field[Any]") -> Scalar:
    kind = type(f.default)
    key: Key = f.metadata["key"]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    if type(value) is not kind:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        raise ConfigError(f"{name} = {value!r}: must be {words[kind]}")
    assert isinstance(value, bool | int | float | str)
    if not key.allows(value):
        wanted = ["finite"] if isinstance(value, float) and not math.isfinite(value) else []
        wanted += [key.range_text().replace("`", "")] if key.range_text() else []
        raise ConfigError(f"{name} = {value!r}: must be {' and '.join(wanted)}")
    return value


def markdown() -> str:
    """Return ``docs/configuration.md`` as it should be."""
    lines = [
        "# Configuration",
        "",
        "Generated from `fedkace_flwr/config.py` by `python -m fedkace_flwr.config`; a test compares the two.",
        "",
        "Set a key with `flwr run . --run-config 'overlap=0 seed=1'`, with a file of such keys "
        "(`--run-config experiments/cifar100.toml`), or in a study (`--set overlap=0`). "
        "Keys marked *Reading* choose between readings of the paper; `docs/method.md` explains them. Keys marked *Inferred* stand for what a rival's publication leaves open.",
    ]
    by_section: dict[str, list[Field[Any]]] = {}
    for section, f in _leaves():
        by_section.setdefault(section, []).append(f)
    for section, leaves in by_section.items():
        title = str(_SECTIONS[section].__doc__).rstrip(".") if section else "Method"
        lines += ["", f"## {title}", "", "| key | default | unit | range | meaning |", "|---|---|---|---|---|"]
        for f in leaves:
            key: Key = f.metadata["key"]
            default = str(f.default).lower() if isinstance(f.default, bool) else f.default
            shown = f'`"{default}"`' if isinstance(f.default, str) else f"`{default}`"
            lines.append(f"| `{_kebab(f.name)}` | {shown} | {key.unit} | {key.range_text()} | {key.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
    target.write_text(markdown(), encoding="utf-8")
    print(target)
