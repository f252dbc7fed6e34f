"""Models of a run with all that predicting needs to know: a client's, and the global one if the run leaves it."""

from collections.abc import Mapping
from typing import Any

import torch

from fedkace_flwr.compute.devices import choose_precision
from fedkace_flwr.data.readers.catalogue import framing_of
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.inference.kept_models import GLOBAL, KeptModels, labels_of
from fedkace_flwr.networks.catalogue import facts_of
from fedkace_flwr.networks.lora import merged
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.atomic import Array

_OUTPUT = ("output.weight", "output.bias")


def models_of(
    experiment: Experiment,
    device: torch.device,
    class_names: tuple[str, ...],
    weights: Mapping[str, Mapping[str, Array]],
    **of_round: Any,
) -> KeptModels:
    """Models of a run, with what its configuration and its data set say about them.

    With open classes the networks have outputs without a name; the models are cut to those that have one.

    Parameters
    ----------
    experiment : Experiment
        Configuration and data set.
    device : device
        Where the models compute, for their precision.
    class_names : tuple of str
        Names of the classes, in the order of their numbers.
    weights : mapping
        Weights of each network, as in :class:`~fedkace_flwr.inference.kept_models.Answering`.
    **of_round : Any
        The other fields of :class:`~fedkace_flwr.inference.kept_models.KeptModels`.
    """
    config, dataset = experiment.config, experiment.dataset
    mean, std = experiment.normalisation
    return KeptModels(
        method=config.method,
        class_names=class_names,
        weights={
            name: _named(merged({**experiment.frozen_weights, **arrays}), len(class_names))
            for name, arrays in weights.items()
        },
        framing=framing_of(config.data, dataset.image_size) if dataset.form.is_picture else None,
        shape=() if dataset.form.is_picture else dataset.form.shape,
        mean=mean,
        std=std,
        network=config.model.network,
        width=config.model.width,
        stem=config.model.stem,
        precision=str(choose_precision(config.run.precision, device)).removeprefix("torch."),
        **of_round,
    )


def _named(weights: Mapping[str, Array], classes: int) -> dict[str, Array]:
    """The weights of a network with its first outputs alone."""
    return {name: array[:classes] if name in _OUTPUT else array for name, array in weights.items()}


def global_model(
    experiment: Experiment, weights: Mapping[str, Array], number: int, agreed: tuple[str, ...] = ()
) -> KeptModels:
    """Return the global model after a round, ready to be written to a folder.

    It predicts the classes that the streams have brought up to that round; where the server does not know them, with
    data from inboxes or open classes, all that have a name.

    Parameters
    ----------
    experiment : Experiment
        The run's configuration and data set.
    weights : mapping of str to array
        The model's weights by name.
    number : int
        The round, from 1.
    agreed : tuple of str
        With open classes, the names that count in that round, of which there is at least one.
    """
    names = agreed if experiment.config.data.grows else experiment.dataset.class_names
    met = _met(experiment, number, len(names))
    told = {"run": "", "round": number, "trained": number, "switched_at": None, "seen": met}
    return models_of(experiment, torch.device("cpu"), names, {GLOBAL: weights}, **told, answers={GLOBAL: met})


def why_not_left(experiment: Experiment, agreed: tuple[str, ...]) -> str:
    """Why a finished run does not leave its global model, in half a sentence; empty if it does.

    ``agreed`` is as in :func:`global_model`.
    """
    if any(encryption.keys()):
        return f"{encryption.VARIABLE} is set, and the model would not be encrypted"
    return why_silent(experiment, agreed)


def why_silent(experiment: Experiment, agreed: tuple[str, ...]) -> str:
    """Why the server's model cannot predict as it is, in half a sentence; empty if it can."""
    config = experiment.config
    if config.data.grows and not agreed:
        return "no class had a name yet"
    if (
        config.privacy.batchnorm_statistics == "local"
        and config.model.trainable in ("all", "norm")  # else they are frozen
        and facts_of(config.model.network, experiment.blueprint).has_running_means
    ):
        return "with batchnorm-statistics = 'local' the server has no batch-norm statistics"
    return ""


def _met(experiment: Experiment, number: int, classes: int) -> tuple[int, ...]:
    if experiment.config.data.arrives or experiment.config.data.grows:
        return tuple(range(classes))
    met = torch.zeros(classes, dtype=torch.bool)
    for client in range(experiment.config.stream.clients):
        met |= experiment.learned(client, number).class_counts(classes) > 0
    return labels_of(met)
