"""Fuzz one parser by coverage: ``python tests/fuzz/coverage_guided.py PARSER [libFuzzer's options]``.

Needs the extra ``fuzz`` (atheris). PARSER is one of ``archive`` (below the checksum) and ``stored`` (state, answer,
checkpoint), ``encrypted`` (below the checksum of an encrypted file), ``arrival``, ``picture``, ``table`` and ``labels`` (files in an inbox),
``folded`` (a reply's arrays between machines), ``study``, ``setting``,
``run-config``, ``policy`` (a site's), ``safetensors`` and ``pth`` (weights to start from), ``idx`` and ``idx-gz`` (images
of a data set), ``model`` (taken away); for example ``stored -runs=1000000``. It ends with the input in a file ``crash-*``
where anything but the documented errors comes out. Without PARSER it prints the names.
"""

import json
import logging
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

INSTRUMENTED = [
    "fedkace_flwr",
    "fedkace_flwr.experiments.studies",
    "zipfile",
    "gzip",
    "yaml",
    "json",
    "tomllib",
]

with atheris.instrument_imports(include=INSTRUMENTED):
    from support.made.parsers import Parsers
    from support.made.pristine import (
        CORPUS,
        dropped,
        folded_weights,
        pristine,
        pristine_idx,
        pristine_model,
        pristine_sealed,
        pristine_weights,
        sealed,
    )

    from fedkace_flwr.config import Config


def main() -> None:
    """Feed one parser, or print the parsers' names."""
    logging.getLogger("fedkace_flwr").setLevel(logging.CRITICAL)  # warnings of millions of inputs
    parsers = Parsers()
    targets = {
        "archive": parsers.archived,
        "stored": lambda content: parsers.stored(sealed(content)),
        "encrypted": parsers.encrypted,
        "arrival": parsers.archived_arrival,
        "picture": parsers.picture,
        "labels": parsers.labels,
        "table": parsers.table,
        "folded": parsers.folded,
        "study": parsers.study,
        "setting": parsers.setting,
        "run-config": parsers.run_config,
        "policy": parsers.policy,
        "safetensors": partial(parsers.weights, ".safetensors"),
        "pth": partial(parsers.weights, ".pth"),
        "idx": partial(parsers.idx, ""),
        "idx-gz": partial(parsers.idx, ".gz"),
        "model": parsers.model,
    }
    if len(sys.argv) < 2:
        print(*targets)
        parsers.close()
        return
    name = sys.argv.pop(1)
    if name not in targets:
        parsers.close()
        sys.exit(f"error: {name}: must be one of {', '.join(targets)}")
    seeds = parsers.folder.with_name(f"{parsers.folder.name}-seeds")
    seeds.mkdir()
    settings, configuration = Config().flat(), ['{"overlap": 1, "seed": 2, "gradient-norm": "sum"}']
    texts: dict[str, list[str]] = {
        "study": CORPUS,
        "table": ["x,label,z\n0,cat,1\n2,dog,3e0\n"],
        "labels": ["name,label\na.png,dog\n", '\ufeff"b.png","cat"\r\n'],
        "setting": [f"{key}={value}" for key, value in settings.items()],
        "run-config": [json.dumps(settings), *configuration],
        "policy": ["labels = false\n[keys]\nepochs = {max = 3}\n", 'unlisted = "default"\n[keys]\ndp = ["local"]\n'],
    }
    examples: dict[str, Iterable[bytes]] = {
        "archive": pristine().values(),
        "stored": pristine().values(),
        "encrypted": pristine_sealed(),
        "arrival": dropped().values(),
        "picture": dropped().values(),
        "folded": [folded_weights()],
        "safetensors": [pristine_weights()[".safetensors"]],
        "pth": [pristine_weights()[".pth"]],
        "idx": pristine_idx()[""],
        "idx-gz": pristine_idx()[".gz"],
        "model": [pristine_model()],
    }
    examples |= {kind: [text.encode() for text in each] for kind, each in texts.items()}
    for number, content in enumerate(examples[name]):
        (seeds / str(number)).write_bytes(content)
    atheris.Setup([sys.argv[0], *sys.argv[1:], str(seeds)], targets[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
