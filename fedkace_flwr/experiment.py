"""A configuration with its data set: streams, test sets and networks.

It is checked as a whole before the first round. One instance serves all clients of a worker process.
"""

import hashlib
from collections.abc import Mapping, Set
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkace_flwr.compute.devices import choose_device, choose_precision
from fedkace_flwr.compute.memory import at_home
from fedkace_flwr.compute.numerics import settle
from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import Dataset, load_dataset
from fedkace_flwr.data.stream import ClientStream, client_stream
from fedkace_flwr.data.weights_file import holds_body, published_weights, weights_for
from fedkace_flwr.errors import ConfigError, DataError, MessageError, closest
from fedkace_flwr.keys import CLASS_NAME, is_class_name
from fedkace_flwr.messaging.travelling import Travelling
from fedkace_flwr.messaging.wire import Shapes, shapes_of
from fedkace_flwr.networks.catalogue import Facts, facts_of, seeded, statistics_of
from fedkace_flwr.networks.lora import adapted
from fedkace_flwr.networks.network import Blueprint, Network, load_weights
from fedkace_flwr.networks.output import simplex
from fedkace_flwr.networks.trainable import freeze
from fedkace_flwr.registry import METHODS
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for, seed_for
from fedkace_flwr.training.cuda_graphs import KeptSteps, can_record
from fedkace_flwr.training.logits_cache import SharedLogits
from fedkace_flwr.training.loop import Preprocess


class Experiment:
    """A configuration with its data set opened.

    Parameters
    ----------
    config : Config
        The configuration.
    progress : bool
        Show a progress bar while the data set is prepared.
    share : float, optional
        Share of a GPU that this process was given, as in :func:`~fedkace_flwr.compute.devices.choose_device`.
    download : bool
        Whether missing files may be downloaded.

    Attributes
    ----------
    taken : str
        Digest of the frozen part that :meth:`take_frozen` took; empty without.

    Raises
    ------
    ConfigError, DataError
        The configuration does not fit the data set, or the data set cannot be opened.
    """

    def __init__(
        self, config: Config, *, progress: bool = False, download: bool = True, share: float | None = None
    ) -> None:
        self.config = config
        self._share = share
        self.dataset: Dataset = load_dataset(config.data, config.run.seed, progress=progress, download=download)
        self.num_classes = config.data.max_classes if config.data.grows else self.dataset.num_classes
        self._streams: dict[int, ClientStream] = {}
        self._tests: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._taken: dict[str, Tensor] = {}
        self.taken = ""
        self._check_sizes()

    def check_streams(self) -> None:
        """Draw the stream and the test set of every client.

        Raises
        ------
        StreamError, DataError
            A stream would run out of samples, or a class has too few test images.
        """
        if self.config.data.arrives:
            return
        for client in range(self.config.stream.clients):
            self.stream(client)
            self._test_sets(client)

    def check_given_weights(self) -> None:
        """Read the weights that the network is to start from, if any are given, as the server does.

        Raises
        ------
        ConfigError
            They do not fit the network, or cannot be had.
        """
        _ = self._given_weights

    def stream(self, client: int) -> ClientStream:
        """The stream of one client, drawn once."""
        if client not in self._streams:
            seed, names = self.config.run.seed, self.dataset.class_names
            self._streams[client] = client_stream(client, seed, self._train_ids, self.config.stream, names)
        return self._streams[client]

    def chunk(self, client: int, round_number: int) -> Samples:
        """The chunk D_t of a client's round (1-based), by sample id, with the labels of the data set.

        These are the samples whose labels come in that round: of what the stream has brought ``label-delay`` rounds
        before, the share that gets any.
        """
        return self._arrived(self._labelled(client, round_number - self.config.stream.label_delay), round_number)

    def drawn(self, client: int, round_number: int) -> Samples:
        """All that the stream brings a client in a round, whether or not it gets labels."""
        return self._arrived(self.stream(client).chunks[round_number - 1], round_number)

    def unlabelled(self, client: int, round_number: int) -> Samples:
        """The samples that a client has at the end of a round and whose labels come later."""
        samples = Samples.none()
        for earlier in range(round_number - self.config.stream.label_delay + 1, round_number + 1):
            samples = samples.followed_by(self._arrived(self._labelled(client, earlier), earlier))
        return samples

    def _labelled(self, client: int, round_number: int) -> npt.NDArray[np.int64]:
        """Ids of a round's samples that get labels at some time; none before the first round."""
        if round_number < 1:
            return np.empty(0, dtype=np.int64)
        ids, share = self.stream(client).chunks[round_number - 1], self.config.stream.label_share
        if share == 1:
            return ids
        generator = np.random.default_rng(seed_for(self.config.run.seed, "labels", client, round_number))
        return ids[generator.random(len(ids)) < share]

    def _arrived(self, ids: npt.NDArray[np.int64], round_number: int) -> Samples:
        return Samples.arrived(torch.from_numpy(ids), self.labels_of(ids), round_number)

    def trains(self, client: int, round_number: int) -> bool:
        """Whether a client is to train in a round (``fraction-train``)."""
        return client in self.config.stream.participants(round_number, self.config.run.seed)

    def learned(self, client: int, round_number: int) -> Samples:
        """The chunks of a client's rounds up to and including this one, of those in which it trains."""
        samples = Samples.none()
        for earlier in range(1, round_number + 1):
            if self.trains(client, earlier):
                samples = samples.followed_by(self.chunk(client, earlier))
        return samples

    def test_set(self, client: int, seen: Tensor) -> Samples:
        """The client's test images of some classes of the data set, by a mask of these; none of none."""
        if not seen.any():
            return Samples.none()
        sets = self._test_sets(client)
        ids = np.concatenate([sets[int(label)] for label in seen.nonzero()])
        return Samples.arrived(torch.from_numpy(ids), self.labels_of(ids), 0)

    def labels_of(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Labels, int64 (n,)."""
        return torch.from_numpy(np.asarray(self.dataset.labels[ids], dtype=np.int64))

    @cached_property
    def device(self) -> torch.device:
        """The device of this process, which from now on computes there as ``precision`` and ``deterministic`` ask."""
        run = self.config.run
        device = choose_device(run.device, self._share)
        settle(device, tf32=run.precision == "tf32", deterministic=run.deterministic)
        return device

    @cached_property
    def preprocess(self) -> Preprocess:
        """Normalisation by :attr:`normalisation`; without it, pictures are brought to [0, 1]."""
        return Preprocess.by_statistics(*self.normalisation, self.device, self.dataset.form)

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation, the network's or the data set's own; 0 and 1 if samples are not normalised."""
        mean, std = statistics_of(self.config.model) or (self.dataset.mean, self.dataset.std)
        return (mean, std) if self.config.data.normalise else ((0.0,) * len(mean), (1.0,) * len(std))

    @property
    def blueprint(self) -> Blueprint:
        """What the networks are built for."""
        model = self.config.model
        return Blueprint(self.num_classes, self.dataset.form.shape, model.width, model.stem)

    def initial_weights(self) -> dict[str, Tensor]:
        """The weights of theta_g^0: drawn from the seed or, apart from the output layer, those of a file or published ones.

        Raises
        ------
        ConfigError
            These do not fit the network, or cannot be had.
        """
        return dict(self._initial_network(seed_for(self.config.run.seed, "weights")).state_dict())

    def network(self, weights: Mapping[str, Tensor]) -> Network:
        """The single network of this process, on its device, with the given weights; it keeps its frozen ones."""
        net = self._network
        load_weights(net, {**_chosen(net.state_dict(), net.frozen), **weights})
        return net

    @cached_property
    def shared_logits(self) -> SharedLogits:
        """Test logits of the network in use, shared by the clients of this process."""
        return SharedLogits(together=self.device.type != "cpu")

    @property
    def captured(self) -> bool:
        """Whether training steps are recorded, or on a CPU taken as if they were (``cuda-graphs``)."""
        wanted = self.config.run.cuda_graphs
        return wanted == "on" or (wanted == "auto" and can_record(self.device))

    @cached_property
    def kept_steps(self) -> KeptSteps:
        """The recorded steps of this process."""
        arrives = self.config.data.arrives  # in numbers that nobody knows
        return KeptSteps(0 if arrives else self.config.largest_chunk + self.config.buffer.capacity)

    @cached_property
    def weight_shapes(self) -> Shapes:
        """Shape and dtype of each parameter and batch-norm statistic by name, in the order of messages."""
        return shapes_of(as_arrays(self._network.state_dict()))

    @cached_property
    def travelling(self) -> Travelling:
        """The arrays that travel between server and clients.

        Raises
        ------
        ConfigError
            The method's clients would reply with none.
        """
        replies = METHODS[self.config.method].replies
        return Travelling.of(self.weight_shapes, self.parameter_names, self.config, replies, self._network.frozen)

    @cached_property
    def frozen_weights(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that never change and never travel (key ``trainable``): those of :meth:`initial_weights`."""
        if self.config.model.trainable == "all":
            return {}
        return as_arrays(_chosen(self._network.state_dict(), self._network.frozen))

    @cached_property
    def frozen_digest(self) -> str:
        """SHA-256 of the frozen arrays, but of no fixed output layer, whose last bits depend on the processor; empty without any."""
        return _digest(self.frozen_part) if self.frozen_weights else ""

    @property
    def frozen_part(self) -> dict[str, npt.NDArray[Any]]:
        """:attr:`frozen_weights` without a fixed output layer, which everyone computes: what a device can be sent."""
        return {name: array for name, array in self.frozen_weights.items() if name not in self.fixed_weights}

    def take_frozen(self, part: Mapping[str, npt.NDArray[Any]], digest: str) -> None:
        """Use another machine's :attr:`frozen_part` from now on, and neither ``weights-file`` nor ``pretrained``.

        Raises
        ------
        MessageError
            It is not the one with this digest, or not one of this network.
        """
        if shapes_of(part) != self.frozen_shapes or (found := _digest(part)) != digest:
            told = (
                "its arrays are not the network's"
                if shapes_of(part) != self.frozen_shapes
                else f"its digest is {found}"
            )
            raise MessageError(f"frozen = {digest}: {told}")
        self.taken = digest
        self._taken = {name: torch.from_numpy(array) for name, array in part.items()}
        for name in ("_given_weights", "_network", "frozen_weights", "frozen_digest"):
            self.__dict__.pop(name, None)

    @cached_property
    def frozen_shapes(self) -> Shapes:
        """Shape and dtype of each array of :attr:`frozen_part`, which need not be there yet."""
        net = self._blank_network(0)
        names = net.frozen - self.fixed_weights.keys()
        return shapes_of(as_arrays(_chosen(net.state_dict(), names)))

    @cached_property
    def fixed_weights(self) -> dict[str, npt.NDArray[Any]]:
        """The weights of the output layer if it is fixed; else none."""
        if self.config.model.output_layer == "learned":
            return {}
        return as_arrays({"output.weight": self._frame, "output.bias": torch.zeros(self.num_classes)})

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Names of the parameters, which gradients change."""
        return frozenset(name for name, _ in self._network.named_parameters())

    @cached_property
    def _network(self) -> Network:
        seed = seed_for(self.config.run.seed, "weights")
        whole = self.config.model.trainable == "all"  # it is given all weights before it is used
        return self._placed(self._blank_network(seed) if whole else self._initial_network(seed), self.device)

    def fresh_network(self, seed: int) -> Network:
        """A new network on this process's device, with initial weights drawn from ``seed``, as :meth:`initial_weights`.

        Its frozen weights are the run's.
        """
        net = self._initial_network(seed)
        if net.frozen:
            load_weights(net, {**net.state_dict(), **_chosen(self._network.state_dict(), net.frozen)})
        return self._placed(net, self.device)

    def network_on_cpu(self) -> Network:
        """A network of this experiment on the CPU, wherever clients compute: for counting, not for training."""
        return self._placed(self._blank_network(0), torch.device("cpu"))

    def _placed(self, net: Network, device: torch.device) -> Network:
        net.precision = choose_precision(self.config.run.precision, device)
        return net.on(device)

    def _blank_network(self, seed: int) -> Network:
        model = self.config.model
        net = seeded(model.network, self.blueprint, seed)
        if model.output_layer == "simplex":
            net.fix_output(self._frame)
        freeze(net, model.trainable, model.lora_rank, generator_for(seed, "adapters"))
        if METHODS[self.config.method].moves_adapted:
            net.frozen -= adapted(net.state_dict().keys())
        return net

    def _initial_network(self, seed: int) -> Network:
        net = self._blank_network(seed)
        drawn = net.state_dict()
        for name, tensor in self._given_weights.items():  # adapters of a smaller rank leave the rest as drawn
            drawn[name][tuple(map(slice, tensor.shape))].copy_(tensor)
        return net

    @cached_property
    def _given_weights(self) -> dict[str, Tensor]:
        """Weights from ``weights-file``, published ones, or adapters from the one for the other; empty without."""
        if self._taken:
            return self._taken
        model, net = self.config.model, self._blank_network(0)
        given = weights_for(net, Path(model.weights_file).expanduser()) if model.weights_file else {}
        if not model.pretrained:
            return given
        if holds_body(given):
            raise ConfigError(
                f"pretrained = true with weights-file = {model.weights_file!r:.200}, which holds more than adapters: "
                "must be false"
            )
        return given | published_weights(net, model.network, self.blueprint)

    @cached_property
    def _frame(self) -> Tensor:
        """The rows of the fixed output layer, float32 (C, F)."""
        generator = generator_for(self.config.run.seed, "output layer")
        return simplex(self.num_classes, self._facts.features, generator)

    @property
    def _facts(self) -> Facts:
        return facts_of(self.config.model.network, self.blueprint)

    @cached_property
    def _train_ids(self) -> list[npt.NDArray[np.int64]]:
        return [self.dataset.train_ids(label) for label in range(self.dataset.num_classes)]

    def _test_sets(self, client: int) -> list[npt.NDArray[np.int64]]:
        if client not in self._tests:
            self._tests[client] = [self._test_ids(client, label) for label in range(self.dataset.num_classes)]
        return self._tests[client]

    def _test_ids(self, client: int, label: int) -> npt.NDArray[np.int64]:
        ids, wanted = self.dataset.test_ids(label), self.config.data.test_per_class
        if not len(ids):
            raise DataError(
                f"class {self.dataset.class_names[label]} of {self.dataset.name} has no test samples; where test-share "
                "splits the samples, it needs two or more"
            )
        if len(ids) < wanted:
            raise DataError(
                f"test-per-class = {wanted}: class {self.dataset.class_names[label]} of {self.dataset.name} "
                f"has {len(ids)} test images"
            )
        if wanted == 0:
            return ids
        generator = np.random.default_rng(seed_for(self.config.run.seed, "test", client, label))
        return np.sort(generator.choice(ids, size=wanted, replace=False))

    def _check_sizes(self) -> None:
        window, capacity, classes = self.config.stream.window, self.config.buffer.capacity, self.num_classes
        if not self.config.data.arrives and window > (drawn := self.dataset.num_classes):
            raise ConfigError(f"window = {window}: must be at most the number of classes, {drawn}")
        self._check_names()
        if capacity < classes:
            raise ConfigError(f"capacity = {capacity}: must be at least the number of classes, {classes}")
        self._check_network()

    def _check_names(self) -> None:
        data, names = self.config.data, self.dataset.class_names
        if data.arrives or not data.grows:
            return
        if odd := [name for name in names if not is_class_name(name)]:
            raise ConfigError(
                f"classes = 'open': class {odd[0]!r:.100} of {self.dataset.name} cannot be sent to the server; "
                f"must be {CLASS_NAME}"
            )
        for name in data.named_classes():
            if name not in names:
                raise ConfigError(
                    f"class-names: {name!r:.100} is no class of {self.dataset.name}{closest(name, names)}"
                )

    def _check_network(self) -> None:
        model, classes = self.config.model, self.num_classes
        if model.network == "resnet18" and model.output_layer == "learned" and self.dataset.form.is_picture:
            return  # nothing to find out, which saves each process the time
        features = self._facts.features
        if model.output_layer == "simplex" and features < classes:
            least = (
                f"at least {-(-classes // 8)}" if model.network == "resnet18" else f"more; it gives {features} features"
            )
            told = f"max-classes = {classes}" if self.config.data.grows else f"{classes} classes"
            raise ConfigError(f"width = {model.width}: with output-layer = 'simplex' and {told}, must be {least}")


@lru_cache(maxsize=1)
def shared_experiment(config: Config, share: float | None = None) -> Experiment:
    """The experiment of this process, which is kept between messages."""
    return Experiment(config, share=share)


def _chosen(weights: Mapping[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name in names}


def _digest(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


def as_arrays(weights: Mapping[str, Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Copies of weights as NumPy arrays."""
    return {name: tensor.numpy().copy() for name, tensor in at_home(weights).items()}
