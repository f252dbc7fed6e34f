"""The sub-models of a TFCL client, as stored in its state between messages.

Pure functions on a dictionary of named tensors. All tasks share one array of tagged weights; each task has a pick
mask, its untagged values (batch normalisation and output layer) and its classes. A task is named by the round that
opened it. N weights, R untagged values, C classes.

A task that returns after later ones were opened trains a copy of its own weights, the augmented copy. Later tasks
continue to pick from the original weights, so no task changes another.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkace_flwr.algorithms import tfcl_tags as tags

Extra = Mapping[str, Tensor]

WEIGHTS, TAGS, AUGMENTED, TASK = "weights", "tags", "augmented", "task"
"""Float (N,); int16 (N,); float (N,) after an older task has returned; and the task trained last."""

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


def opened(extra: Extra) -> list[int]:
    """All tasks, in the order in which they were opened."""
    return sorted(int(name.removeprefix(_CLASSES)) for name in extra if name.startswith(_CLASSES))


def finished(extra: Extra) -> list[int]:
    """Tasks with a mask, whose sub-models can answer."""
    return sorted(int(name.removeprefix(_PICK)) for name in extra if name.startswith(_PICK))


def is_newest(extra: Extra, task: int) -> bool:
    """Whether no later task has been opened."""
    return all(other <= task for other in opened(extra))


def task_with(extra: Extra, classes: Tensor) -> int | None:
    """The task with exactly these classes, bool (C,), if there is one."""
    return next((task for task in opened(extra) if torch.equal(extra[classes_of(task)], classes)), None)


def weights_of(extra: Extra, task: int) -> Tensor:
    """Weights (N,) as a task sees them: its own from the augmented copy, if there is one."""
    weights = extra[WEIGHTS]
    return torch.where(extra[TAGS] == task, extra.get(AUGMENTED, weights), weights)


def effective_of(extra: Extra, task: int) -> Tensor:
    """The effective weights of a finished task's sub-model, (N,)."""
    weights = weights_of(extra, task)
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
    kept = {**extra, TAGS: owners, rest_of(task): others, TASK: torch.tensor(task)}
    newest = is_newest(extra, task)
    if newest:
        kept[WEIGHTS] = weights
    if not newest or AUGMENTED in extra:
        others_own = (owners != tags.FREE) & (owners != task)
        kept[AUGMENTED] = torch.where(others_own, extra.get(AUGMENTED, extra[WEIGHTS]), weights)
    return kept
