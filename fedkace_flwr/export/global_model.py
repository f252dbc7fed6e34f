"""Models of a run with all that predicting needs to know: a client's, and the global one if the run leaves it."""

from collections.abc import Mapping
from typing import Any

import torch

from fedkace_flwr.compute.devices import choose_precision
from fedkace_flwr.data.readers.catalogue import framing_of
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.inference.kept_models import GLOBAL, KeptModels, labels_of
from fedkace_flwr.networks.catalogue import facts_of
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.atomic import Array


def models_of(experiment: Experiment, device: torch.device, **of_round: Any) -> KeptModels:
    """Models of a run, with what its configuration and its data set say about them.

    Parameters
    ----------
    experiment : Experiment
        Configuration and data set.
    device : device
        Where the models compute, for their precision.
    **of_round : Any
        The other fields of :class:`~fedkace_flwr.inference.kept_models.KeptModels`.
    """
    config, dataset = experiment.config, experiment.dataset
    mean, std = experiment.normalisation
    return KeptModels(
        method=config.method,
        class_names=dataset.class_names,
        framing=framing_of(config.data, dataset.image_size),
        mean=mean,
        std=std,
        network=config.model.network,
        width=config.model.width,
        stem=config.model.stem,
        precision=str(choose_precision(config.run.precision, device)).removeprefix("torch."),
        **of_round,
    )


def global_model(experiment: Experiment, weights: Mapping[str, Array], number: int) -> KeptModels:
    """Return the global model after a round, ready to be written to a folder.

    It predicts the classes that the streams have brought up to that round; of data from inboxes, whose classes the
    server does not know, all.

    Parameters
    ----------
    experiment : Experiment
        The run's configuration and data set.
    weights : mapping of str to array
        The model's weights by name.
    number : int
        The round, from 1.
    """
    met = _met(experiment, number)
    told = {"run": "", "round": number, "trained": number, "switched_at": None, "seen": met}
    return models_of(experiment, torch.device("cpu"), **told, answers={GLOBAL: met}, weights={GLOBAL: weights})


def why_not_left(experiment: Experiment) -> str:
    """Why a finished run does not leave its global model, in half a sentence; empty if it does."""
    if any(encryption.keys()):
        return f"{encryption.VARIABLE} is set, and the model would not be encrypted"
    return lacks_statistics(experiment)


def lacks_statistics(experiment: Experiment) -> str:
    """Why the server's model cannot predict as it is, in half a sentence; empty if it can."""
    config = experiment.config
    if (
        config.privacy.batchnorm_statistics == "local"
        and facts_of(config.model.network, experiment.blueprint).has_running_means
    ):
        return "with batchnorm-statistics = 'local' the server has no batch-norm statistics"
    return ""


def _met(experiment: Experiment, number: int) -> tuple[int, ...]:
    if experiment.config.data.arrives:
        return tuple(range(experiment.num_classes))
    met = torch.zeros(experiment.num_classes, dtype=torch.bool)
    for client in range(experiment.config.stream.clients):
        met |= experiment.learned(client, number).class_counts(experiment.num_classes) > 0
    return labels_of(met)
