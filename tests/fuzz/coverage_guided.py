"""Fuzz one parser by coverage: ``python tests/fuzz/coverage_guided.py PARSER [libFuzzer's options]``.

Needs the extra ``fuzz`` (atheris). PARSER is ``archive``, ``stored``, ``study``, ``setting`` or ``run-config``; for
example ``stored -runs=1000000``. It ends with the input in a file ``crash-*`` where anything but the documented
errors comes out.
"""

import json
import logging
import sys
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

with atheris.instrument_imports(include=["fedkace_flwr", "experiments.study", "zipfile", "yaml", "json"]):
    from parsers import Parsers, pristine, sealed
    from test_fuzz import CORPUS

    from fedkace_flwr.config import Config


def main() -> None:
    """Feed one parser."""
    name = sys.argv.pop(1)
    logging.getLogger("fedkace_flwr").setLevel(logging.CRITICAL)  # warnings of millions of inputs
    parsers = Parsers()
    target = {
        "archive": parsers.archived,
        "stored": lambda content: parsers.stored(sealed(content)),
        "study": parsers.study,
        "setting": parsers.setting,
        "run-config": parsers.run_config,
    }[name]
    seeds = parsers.folder.with_name(f"{parsers.folder.name}-seeds")
    seeds.mkdir()
    texts = {"study": CORPUS, "setting": [f"{key}={value}" for key, value in Config().flat().items()]}
    texts["run-config"] = [json.dumps(Config().flat()), '{"overlap": 1, "seed": 2, "gradient-norm": "sum"}']
    for number, content in enumerate([text.encode() for text in texts.get(name, [])] or pristine().values()):
        (seeds / str(number)).write_bytes(content)
    atheris.Setup([sys.argv[0], *sys.argv[1:], str(seeds)], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
