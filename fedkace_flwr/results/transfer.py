"""Forgetting and transfer, from the accuracies by class in the records of a run.

The definitions are those of continual learning with one row of accuracies for each moment and one column for each
thing learned. Here a moment is a round, and a thing learned is a class, since chunks carry no task labels and classes
come back. Every client has a matrix of its own, and the numbers of a run are means over its clients.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def accuracy_matrix(records: Sequence[Mapping[str, Any]], client: int, column: str = "class_accuracy") -> Matrix:
    """Return a client's accuracies by round and class, float64 (T, C); NaN where there is none.

    Parameters
    ----------
    records : sequence of mapping
        Lines of ``rounds.jsonl``.
    client : int
        The client's number.
    column : {"class_accuracy", "new_class_accuracy"}
        The field to read. C is 0 if no record has it for this client.
    """
    rows = [_entry(record, column, client) for record in records]
    matrix = np.full((len(rows), max((len(row) for row in rows if row is not None), default=0)), np.nan)
    for index, row in enumerate(rows):
        if row is not None:
            matrix[index] = row
    return matrix


def forgetting(matrix: Matrix) -> float | None:
    """Return the mean over classes of the best accuracy in an earlier round minus that of the last round.

    After Chaudhry et al., "Riemannian Walk for Incremental Learning" (ECCV 2018), for classes that were tested in the
    last round and in an earlier one; negative if the last round is the best. None if there is no such class.

    Parameters
    ----------
    matrix : ndarray
        From :func:`accuracy_matrix`.
    """
    tested = matrix[~np.isnan(matrix).all(axis=1)]
    if len(tested) < 2:
        return None
    with warnings.catch_warnings():  # classes that are met in the last round have no earlier accuracy
        warnings.simplefilter("ignore", RuntimeWarning)
        return _mean(np.nanmax(tested[:-1], axis=0) - tested[-1])


def backward_transfer(matrix: Matrix) -> float | None:
    """Return the mean over classes of the accuracy in the last round minus that of the first round that tested them.

    After Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning" (NeurIPS 2017): positive if later
    rounds improved what was known of a class. Classes that only the last round tested do not count. None if there is
    no other class.

    Parameters
    ----------
    matrix : ndarray
        From :func:`accuracy_matrix`.
    """
    tested = matrix[~np.isnan(matrix).all(axis=1)]
    if len(tested) < 2:
        return None
    first = np.argmax(~np.isnan(tested), axis=0)
    gains = tested[-1] - tested[first, np.arange(tested.shape[1])]
    return _mean(gains[first < len(tested) - 1])


def forward_transfer(untrained: Matrix, seen: Sequence[int | None]) -> float | None:
    """Return the mean over classes of their accuracy before the client trained on them, minus that of guessing.

    After Lopez-Paz and Ranzato (NeurIPS 2017), with the received model, so that it measures what other clients taught
    of a class. Classes of the first round in which clients trained have no such model. None if there is no other class.

    Parameters
    ----------
    untrained : ndarray
        From :func:`accuracy_matrix` with ``new_class_accuracy``.
    seen : sequence of int or None
        Number of classes that the client has met, by round, with those of the round.
    """
    chance = np.array([1 / classes if classes else np.nan for classes in seen])
    return _mean(untrained - chance[:, None])


def transfer(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return forgetting, backward and forward transfer of a run, as means over clients; None where unknown.

    Parameters
    ----------
    records : sequence of mapping
        Lines of ``rounds.jsonl``.
    """
    clients = range(max((len(record["client_accuracy"]) for record in records), default=0))
    learned = [accuracy_matrix(records, client) for client in clients]
    untrained = [accuracy_matrix(records, client, "new_class_accuracy") for client in clients]
    seen = [[_entry(record, "seen_classes", client) for record in records] for client in clients]
    begun = next(
        (n for n, record in enumerate(records) if any(s is not None for s in record.get("buffer_size") or ())), -1
    )
    if records and records[0].get("round", 1) == 1:  # what came before models were trained measures nothing
        untrained, seen = [each[begun + 1 :] for each in untrained], [each[begun + 1 :] for each in seen]
    return {
        "forgetting": _known(map(forgetting, learned)),
        "backward_transfer": _known(map(backward_transfer, learned)),
        "forward_transfer": _known(map(forward_transfer, untrained, seen)),
    }


def _entry(record: Mapping[str, Any], column: str, client: int) -> Any:
    """What a record has of a client; None if it has nothing, or the client had not joined."""
    values = record.get(column) or ()
    return values[client] if client < len(values) else None


def _known(values: Any) -> float | None:
    return _mean(np.array([value for value in values if value is not None], dtype=np.float64))


def _mean(values: Matrix) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None
