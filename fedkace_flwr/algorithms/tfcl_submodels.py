"""The sub-models of a TFCL client, as stored in its state between messages.

Pure functions on a dictionary of named tensors. All tasks share one array of tagged weights; each task has a pick
mask, its untagged values (batch normalisation and output layer) and its classes. A task is named by the round that
opened it. N weights, R untagged values, C classes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkace_flwr.algorithms import tfcl_tags as tags

Extra = Mapping[str, Tensor]

WEIGHTS, TAGS, TASK = "weights", "tags", "task"
"""Float (N,); int16 (N,); and the task trained last."""

_PICK, _REST, _CLASSES = "pick.", "rest.", "classes."


def pick_of(task: int) -> str:
    """Name of a finished task's mask, packed bits."""
    return f"{_PICK}{task}"


def rest_of(task: int) -> str:
    """Name of a task's untagged values, float (R,)."""
    return f"{_REST}{task}"


def classes_of(task: int) -> str:
    """Name of a task's classes, bool (C,)."""
    return f"{_CLASSES}{task}"


def effective_of(extra: Extra, task: int) -> Tensor:
    """The effective weights of a finished task's sub-model, (N,)."""
    weights = extra[WEIGHTS]
    picked = tags.unpack_bits(extra[pick_of(task)], len(weights)).float()
    return tags.effective_weights(weights, extra[TAGS], task, picked)


def with_learned(extra: Extra, task: int, weights: Tensor, others: Tensor, owners: Tensor) -> dict[str, Tensor]:
    """Store what a task has learned, without changing the effective weights of any other task.

    Parameters
    ----------
    extra : mapping
        The tensors so far, including the task's classes.
    task : int
        The task.
    weights, others : Tensor
        Float (N,) and (R,). Only weights that the task owns or has freed are used.
    owners : Tensor
        int16 (N,): the tags.
    """
    return {**extra, WEIGHTS: weights, TAGS: owners, rest_of(task): others, TASK: torch.tensor(task)}
