"""The sub-models of a TFCL client, as its state holds them between messages.

Pure tensor bookkeeping over a dictionary of named tensors. All tasks share one array of tagged weights; each task
has a pick mask, what is not tagged (batch normalisation and output layer), and its classes. A task is named by the
round that opened it. N weights, R untagged values, C classes.

A task that comes back after later ones were opened trains a copy of its own weights, the augmented one. Later tasks
go on picking from the weights as they found them, so that no task changes another.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkace_flwr.algorithms import tfcl_tags as tags

Extra = Mapping[str, Tensor]

WEIGHTS, TAGS, AUGMENTED, TASK = "weights", "tags", "augmented", "task"
"""Float (N,), int16 (N,), float (N,) once an older task has come back, and the task trained last."""

_PICK, _REST, _CLASSES = "pick.", "rest.", "classes."


def pick_of(task: int) -> str:
    """Name of a finished task's mask, packed bits."""
    return f"{_PICK}{task}"


def rest_of(task: int) -> str:
    """Name of what is not tagged, float (R,)."""
    return f"{_REST}{task}"


def classes_of(task: int) -> str:
    """Name of a task's classes, bool (C,)."""
    return f"{_CLASSES}{task}"


def opened(extra: Extra) -> list[int]:
    """All tasks, in the order in which they were opened."""
    return sorted(int(name.removeprefix(_CLASSES)) for name in extra if name.startswith(_CLASSES))


def finished(extra: Extra) -> list[int]:
    """Tasks with a mask, so with a sub-model that can answer."""
    return sorted(int(name.removeprefix(_PICK)) for name in extra if name.startswith(_PICK))


def is_newest(extra: Extra, task: int) -> bool:
    """Whether no later task has been opened."""
    return all(other <= task for other in opened(extra))


def task_with(extra: Extra, classes: Tensor) -> int | None:
    """The task of exactly these classes, bool (C,), if there is one."""
    return next((task for task in opened(extra) if torch.equal(extra[classes_of(task)], classes)), None)


def weights_of(extra: Extra, task: int) -> Tensor:
    """Weights (N,) as a task sees them: its own from the augmented copy, where there is one."""
    weights = extra[WEIGHTS]
    return torch.where(extra[TAGS] == task, extra.get(AUGMENTED, weights), weights)


def effective_of(extra: Extra, task: int) -> Tensor:
    """What a finished task's sub-model computes with, (N,)."""
    weights = weights_of(extra, task)
    picked = tags.unpack_bits(extra[pick_of(task)], len(weights)).float()
    return tags.effective_weights(weights, extra[TAGS], task, picked)


def with_learned(extra: Extra, task: int, weights: Tensor, others: Tensor, owners: Tensor) -> dict[str, Tensor]:
    """Put in place what a task has learned; nothing that another task computes with changes.

    Parameters
    ----------
    extra : mapping
        What is known so far; the task's classes among it.
    task : int
        The task.
    weights, others : Tensor
        Float (N,) and (R,). Of the weights those count that the task owns, and those that it has freed.
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
