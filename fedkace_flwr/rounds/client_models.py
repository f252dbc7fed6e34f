"""Checkpoint format of models that the server keeps for single clients."""

from collections.abc import Mapping

from flwr.app import ArrayRecord

from fedkace_flwr.messaging import wire


def pack(models: Mapping[int, ArrayRecord]) -> tuple[dict[str, wire.NumpyArray], dict[str, int]]:
    """Arrays of each distinct record once, named ``<index>.<name>``, and the index of each client's record."""
    distinct = list({id(model): model for model in models.values()}.values())
    index = {id(model): number for number, model in enumerate(distinct)}
    arrays = {
        f"{number}.{name}": array for number, model in enumerate(distinct) for name, array in wire.unpack(model).items()
    }
    return arrays, {str(client): index[id(model)] for client, model in models.items()}


def unpack(arrays: Mapping[str, wire.NumpyArray], held: Mapping[str, int]) -> dict[int, ArrayRecord]:
    """Undo :func:`pack`; clients that shared a record share one again."""
    parts: dict[int, dict[str, wire.NumpyArray]] = {}
    for key, array in arrays.items():
        number, _, name = key.partition(".")
        parts.setdefault(int(number), {})[name] = array
    distinct = {number: wire.array_record(part) for number, part in parts.items()}
    return {int(client): distinct[number] for client, number in held.items()}
