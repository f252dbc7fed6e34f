"""Keys of version 1.0 that are gone: records of then are read with them, and who types one is told what it is now.

They are known for one release.
"""

from collections.abc import Mapping
from urllib.parse import urlencode

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import joined

CONSTANTS: Mapping[str, object] = {
    "clients-together": 1,
    "dcfcl-batch-norm": "mean",
    "dcfcl-candidates": "auto",
    "dcfcl-distil-classes": "old",
    "dcfcl-epsilon": 0.2,
    "dcfcl-lambda": 0.2,
    "dcfcl-temperature": 2.0,
    "dp-delta": 1e-05,
    "fedcbdr-balanced": True,
    "fedcbdr-new-columns": "chunk",
    "fedcbdr-replacement": False,
    "fedcbdr-scores": "joint",
    "fedcbdr-tau-new": 1.1,
    "fedcbdr-tau-old": 0.9,
    "fedcbdr-temperatures": "paper",
    "fedcbdr-weight-new": 0.9,
    "fedcbdr-weight-old": 1.1,
    "flwf-lambda": 1.0,
    "flwf-temperature": 2.0,
    "max-examples": 0,
    "model-average": 0.0,
    "ofcl-aggregation": "mean",
    "ofcl-merge": "global",
    "ofcl-rescore": "current",
    "ofcl-views": "per-sample",
    "refed-anchor": "current",
    "refed-gradient": "full",
    "refed-lambda": 0.5,
    "refed-learning-rate": 0.01,
    "refed-power": 1,
    "refed-reduction": "mean",
    "refed-start": "global",
    "refed-steps": 5,
    "secagg-range": 8.0,
    "shrinkage": 0.1,
    "stored-logits": 0.0,
    "tfcl-group": "round",
    "tfcl-group-jaccard": 0.5,
    "tfcl-head": "fresh",
    "tfcl-inference": "latest",
    "tfcl-label-weight": 0.9,
    "tfcl-loss": "cross-entropy",
    "tfcl-pick-learning-rate": 0.0001,
    "tfcl-prune": "within-round",
    "tfcl-temperature": 5.0,
    "tfcl-trace": "round",
}
"""Keys that nobody has ever set otherwise, with the value that is a constant now."""

PLACES: Mapping[str, str] = {
    "cache-dir": "the variable FEDKACE_CACHE_DIR of each machine",
}
"""Keys whose values are given elsewhere; records do not hold them."""

NAMES: Mapping[str, str] = {
    **dict.fromkeys(("aggregation-rule", "byzantine-clients"), "aggregation"),
    "attack-scale": "attack",
    "below-quorum-limit": "below-quorum",
    **dict.fromkeys(("centralized-every", "centralized-first"), "centralized-rounds"),
    **dict.fromkeys(("clip-bound", "direction-bound", "norm-bound", "retention-bound", "statistics-bound"), "defence"),
    **dict.fromkeys(("data-source", "emnist-split"), "dataset"),
    **dict.fromkeys(("hub-image", "hub-label", "hub-name", "hub-subset", "hub-test"), "dataset"),
    "gradient-bias": "gradient-norm",
    "inference": "predict-with",
    "landmarks": "selection",
    "recalibrate": "recalibrate-batchnorm",
    "replay-gradient": "replay-weight",
    "statistics": "batchnorm-statistics",
    "step": "cuda-graphs",
    **dict.fromkeys(("stream-blur", "stream-concentration", "stream-drift"), "stream"),
    "tensorboard": "tracker",
    "tf32": "precision",
    "views": "test-time-augmentation",
}
"""Keys that have another name or are part of another key, with that."""

_WORDS: Mapping[str, Mapping[object, object]] = {
    "step": {"eager": "off", "captured": "on"},
    "tensorboard": {True: "tensorboard", False: "none"},
    "views": {"one": "none"},
}
_CONCENTRATION = ("stream-concentration", 1.0)
_NUMBERS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "attack": (("attack-scale", 1.0),),
    "blurred": (("stream-blur", 0.1),),
    "dirichlet": (_CONCENTRATION, ("stream-drift", 0.1)),
    "quantity-skew": (_CONCENTRATION,),
    **dict.fromkeys(("skip", "repeat"), (("below-quorum-limit", 5),)),
    **dict.fromkeys(("trimmed-mean", "multi-krum"), (("byzantine-clients", 0),)),
    **dict.fromkeys(("hbms", "information"), (("landmarks", 0),)),
}
"""What followed a word in keys of its own, with the defaults; ``attack`` stands for any attack."""

_BOUNDS_OFF = {
    "clip-bound": 0,
    "direction-bound": -1,
    "statistics-bound": -1,
    "retention-bound": 0,
    "norm-bound": 0,
}


def told(name: str) -> str:
    """Return what became of a key, to end an error message with; empty if there never was such a key."""
    if name in CONSTANTS:
        return f"; it is no key any more, the value is always {CONSTANTS[name]!r}"
    if name in NAMES:
        return f"; it is now called {NAMES[name]}"
    return f"; it is now part of {PLACES[name]}, see docs/configuration.md" if name in PLACES else ""


def renewed(recorded: Mapping[str, object]) -> dict[str, object]:
    """Return a recorded configuration with today's keys; those that are given as well win over bounds of updates.

    Where bounds of updates were recorded, ``defence`` is on, unless all were off or had no effect, or there was one
    alone.

    Raises
    ------
    ConfigError
        A key that is a constant now has another value.
    """
    gone = CONSTANTS.keys() | NAMES.keys() | PLACES.keys()
    values = {name: value for name, value in recorded.items() if name not in gone}
    for name in CONSTANTS.keys() & recorded.keys():
        if recorded[name] != CONSTANTS[name]:
            raise ConfigError(f"{name} = {recorded[name]!r:.100}{told(name)}")
    old = {name: recorded[name] for name in NAMES if name in recorded}
    if values.get("inbox-bound") == 0:  # the default when no inbox was bounded
        del values["inbox-bound"]
    if values.get("aggregation") == "none":
        del values["aggregation"]
        values |= {"method": "lkc"} if values.get("method", "fedkace") == "fedkace" else {}
    for name in ("aggregation-rule", "inference", "recalibrate", "statistics", "step", "tensorboard", "views"):
        if name in old:
            values[NAMES[name]] = _WORDS.get(name, {}).get(old[name], old[name])
    for word, numbers in _NUMBERS.items():
        key = NAMES[numbers[0][0]]
        if values.get(key) == word or (word == "attack" == key and values.get(key, "none") != "none"):
            given = [old.get(name, default) for name, default in numbers]
            values[key] = joined(str(values[key]), given, [default for _, default in numbers])
    if old.get("replay-gradient") == "full" and values.get("replay-weight", "balanced") == "balanced":
        values["replay-weight"] = "balanced-full"
    if old.get("gradient-bias"):
        values["gradient-norm"] = f"{values.get('gradient-norm', 'sum')}-with-bias"
    if old.get("tf32") and values.get("precision", "fp32") == "fp32":
        values["precision"] = "tf32"
    if (every := old.get("centralized-every", 1)) != 1:
        values["centralized-rounds"] = joined("every", [every, old.get("centralized-first", 1)], [1, 1])
    return values | _data(values, old) | _defence(values, old)


def _data(values: Mapping[str, object], old: Mapping[str, object]) -> dict[str, object]:
    if old.get("data-source") == "inbox":
        return {"dataset": "inbox"}
    if values.get("dataset") == "emnist":
        return {"dataset": f"emnist-{old.get('emnist-split', 'balanced')}"}
    if values.get("dataset") == "hub":
        name = f":{old['hub-name']}" if old.get("hub-name") else ""
        asked = {what: old.get(f"hub-{what}") for what in ("subset", "image", "label", "test")}
        options = urlencode({what: column for what, column in asked.items() if column})
        return {"dataset": f"hub{name}{'?' if options else ''}{options}"} if old else {}
    return {}


def _defence(values: Mapping[str, object], old: Mapping[str, object]) -> dict[str, object]:
    bounds = _BOUNDS_OFF.keys() & old.keys()
    if not bounds or "defence" in values:
        return {}
    hidden = values.get("secagg") is True or values.get("dp") == "central"  # where bounds had no effect
    # The first version had norm-bound alone, which none of its kept runs met.
    alone = bounds == {"norm-bound"}
    off = hidden or alone or all(old[name] == _BOUNDS_OFF[name] for name in bounds)
    return {"defence": "off" if off else "on"}
