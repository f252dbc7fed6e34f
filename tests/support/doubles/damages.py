"""Ways to damage a reply, and the kind of failure that the server records for each."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict

from fedkace_flwr.messaging import wire
from support.doubles.hostile import Damage


def arrays(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Damage:
    """Change the arrays; a message without arrays is lost."""

    def damage(content: RecordDict) -> RecordDict | None:
        if wire.ARRAYS not in content.array_records:
            return None
        content[wire.ARRAYS] = wire.array_record(change(wire.unpack(content.array_records[wire.ARRAYS])))
        return content

    return damage


def each(change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """Change every floating-point array."""
    return arrays(lambda held: {n: change(a.copy()) if a.dtype.kind == "f" else a for n, a in held.items()})


def filled(value: float) -> Damage:
    def put(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[-1:] = value
        return array

    return each(put)


def named(end: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """Change the arrays whose names end like this."""
    return arrays(lambda held: {n: change(a) if n.endswith(end) else a for n, a in held.items()})


def rotated(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = list(held)
    return dict(zip(names, [held[name] for name in (*names[1:], names[0])], strict=True))


def raw(data: Callable[[bytes], bytes]) -> Damage:
    """Change every array's bytes but not its declared dtype and shape."""

    def damage(content: RecordDict) -> RecordDict | None:
        if wire.ARRAYS not in content.array_records:
            return None
        old = content.array_records[wire.ARRAYS]
        forged = {n: Array(a.dtype, tuple(a.shape), a.stype, data(a.data)) for n, a in old.items()}
        content[wire.ARRAYS] = ArrayRecord(forged)
        return content

    return damage


def counted(number: int) -> Damage:
    """Change the number of samples in the replies of clients that have trained on some."""

    def damage(content: RecordDict) -> RecordDict | None:
        if wire.ARRAYS not in content.array_records:
            return None
        content.metric_records[wire.METRICS][wire.EXAMPLES] = number
        return content

    return damage


def told(**metrics: Any) -> Damage:
    def damage(content: RecordDict) -> RecordDict | None:
        if wire.METRICS not in content.metric_records:
            return None
        for name, value in metrics.items():
            content.metric_records[wire.METRICS][name.replace("_", "-")] = value
        return content

    return damage


def sat_out(number: int) -> Damage:
    """Make a training reply that contains a model but claims that there was nothing to train on."""

    def damage(content: RecordDict) -> RecordDict | Error | None:
        return told(sat_out=number)(content) if wire.ARRAYS in content.array_records else None

    return damage


def ending_alone(content: RecordDict) -> RecordDict | None:
    if wire.METRICS not in content.metric_records:
        return None
    content.metric_records[wire.METRICS].pop(wire.STARTED, None)
    content.metric_records[wire.METRICS][wire.FINISHED] = 1.0
    return content


def another_stype(content: RecordDict) -> RecordDict | None:
    if wire.ARRAYS not in content.array_records:
        return None
    for array in content.array_records[wire.ARRAYS].values():
        array.stype = "pickle"
    return content


def npy(shape: str, descr: str = "'<f4'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


MODEL_FAULTS: dict[str, tuple[Damage, str]] = {
    "nan": (filled(np.nan), "values"),
    "inf": (filled(np.inf), "values"),
    "minus inf": (filled(-np.inf), "values"),
    "huge": (each(lambda a: np.full_like(a, 1e30)), "norm"),
    "the largest floats": (each(lambda a: np.full_like(a, np.finfo(a.dtype).max)), "norm"),
    "fifty times": (named("weight", lambda a: 50 * a), "norm"),
    "huge statistics": (named("running_mean", lambda a: np.full_like(a, 1e6)), "norm"),
    "huge variances": (named("running_var", lambda a: np.full_like(a, 1e12)), "norm"),
    "negative variances": (named("running_var", lambda a: -np.ones_like(a)), "values"),
    "a counter far ahead": (named("num_batches_tracked", lambda a: np.full_like(a, 2**62)), "values"),
    "a counter below zero": (named("num_batches_tracked", lambda a: np.full_like(a, -1)), "values"),
    "swapped keys": (arrays(rotated), "arrays"),
    "one class more": (named("output.bias", lambda a: np.append(a, a[:1])), "arrays"),
    "one class less": (named("output.weight", lambda a: a[:-1]), "arrays"),
}

FAULTS: dict[str, tuple[Damage, str]] = {
    "shape": (each(lambda a: a.reshape(-1)[:, None]), "arrays"),
    "dtype": (each(lambda a: a.astype(np.float16)), "arrays"),
    "byte order": (each(lambda a: a.astype(a.dtype.newbyteorder())), "arrays"),
    "a name more": (arrays(lambda held: {**held, "surprise": np.zeros(1, np.float32)}), "arrays"),
    "a name less": (arrays(lambda held: dict(list(held.items())[1:])), "arrays"),
    "no arrays": (arrays(lambda held: {}), "arrays"),
    "no samples": (counted(0), "count"),
    "negative samples": (counted(-7), "count"),
    "absurd samples": (counted(10**15), "count"),
    "more samples than fit 64 bits": (counted(2**70), "metrics"),
    "an exception": (lambda content: Error(2, "Traceback\nOSError: disk on fire"), "error"),
    "an error as of a lost process": (lambda content: Error(0, "gone"), "error"),
    "not sent": (lambda content: None, "refused"),
    "nothing": (lambda content: RecordDict(), "records"),
    "numbers elsewhere": (lambda content: RecordDict({wire.METRICS: ConfigRecord({wire.EXAMPLES: 1})}), "records"),
    "cut short": (raw(lambda data: data[: len(data) // 2]), "arrays"),
    "no header": (raw(lambda data: b""), "arrays"),
    "a pickle": (raw(lambda data: b"\x80\x04N."), "arrays"),
    "pickled objects": (raw(lambda data: npy("(2,)", "'|O'")), "arrays"),
    "a header of a terabyte": (raw(lambda data: npy("(274877906944,)")), "arrays"),
    "a header without sense": (raw(lambda data: npy("((((" * 10)), "arrays"),
    "more than the array": (raw(lambda data: data + b"more"), "arrays"),
    "another serialisation": (another_stype, "arrays"),
    "sat out with a model": (sat_out(1), "records"),
    "half sat out": (sat_out(7), "records"),
    "a number that is none": (told(gap=float("nan")), "metrics"),
    "accuracy above one": (told(accuracy=1.5), "metrics"),
    "seconds of a list": (told(training_seconds=[1.0, 2.0]), "metrics"),
    "seconds below zero": (told(training_seconds=-1.0), "metrics"),
    "seconds without end": (told(training_seconds=1e308), "metrics"),
    "no class seen": (told(seen_classes=0), "metrics"),
    "a switch that is no round": (told(switched_at=0.5), "metrics"),
    "a histogram too short": (told(buffer_classes=[1, 2]), "metrics"),
    "a list of half a million": (told(replay_weights=[1.0] * 500_000), "size"),
    "an end without a start": (ending_alone, "metrics"),
}
