"""Inference on the edge while rounds go on: ``python -m fedkace_flwr.inference.predict --state DIR IMAGE...``, or a service.

Predicts with the model that the client's switch has chosen, from the files that the client keeps
(:mod:`fedkace_flwr.inference.model_files`), or with an exported model.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from fedkace_flwr.data.images import read_square
from fedkace_flwr.errors import ConfigError, DataError, FedkaceError
from fedkace_flwr.inference.array_input import MAX_ARRAY_BYTES, read_samples
from fedkace_flwr.inference.kept_models import Predictor
from fedkace_flwr.inference.model_files import check, load_newest
from fedkace_flwr.storage.files import read_bytes

_FAILED = 2
_MODULE = "python -m fedkace_flwr.inference.predict"


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises
        ------
        ConfigError
            Always.
        """
        command = self.prog.split()[-1].rpartition(".")[2]
        raise ConfigError(f"{command}: {message}; see {self.prog} --help")


def main(arguments: Sequence[str], program: str = "") -> int:
    """Run the command and return its exit status: 0, or 2 if an argument is wrong or any prediction failed.

    Parameters
    ----------
    arguments : sequence of str
        What follows the program's name; beginning with ``serve``, for the service.
    program : str
        The program that has ``predict`` and ``serve`` as commands, for its help; by default this module.
    """
    warnings.filterwarnings("ignore", module=r"PIL\b")  # about odd metadata; unreadable pictures are reported anyway
    serves = arguments[:1] == ["serve"]
    names = (f"{program} predict", f"{program} serve") if program else (_MODULE, f"{_MODULE} serve")
    parser = service_parser(names[1]) if serves else prediction_parser(*names)
    try:
        options = parser.parse_args(arguments[1:] if serves else arguments)
        torch.set_num_threads(options.threads)
        return _serve(options) if serves else _predict(options)
    except (FedkaceError, OSError) as error:
        return _failed(str(error))


def _predict(options: argparse.Namespace) -> int:
    predictor = load_newest(options.state)
    answers = [answer for path in options.images for answer in _answers(predictor, path, options.top)]
    if options.json:
        print(json.dumps({"model": predictor.kept.described(), "answers": answers}))
    else:
        kept = predictor.kept
        print(f"{kept.answering} model of round {kept.round}, {len(kept.seen)} of {len(kept.class_names)} classes met")
    failed = False
    for answer in answers:
        if "error" in answer:
            failed = True
            _failed(f"{answer['image']}: {answer['error']}")
        elif not options.json:
            likely = ", ".join(f"{each['class']} {100 * each['probability']:.2f} %" for each in answer["classes"])
            print(f"{answer['image']}: {likely}")
    return _FAILED if failed else 0


def _answers(predictor: Predictor, path: Path, top: int) -> list[dict[str, Any]]:
    """The answer to a picture, or to each of a file's arrays."""
    kept = predictor.kept
    try:
        samples = read_square(path, kept.framing)[None] if kept.framing else read_samples(kept.shape, _content(path))
    except DataError as error:
        return [{"image": str(path), "error": str(error)}]
    names = [str(path)] if len(samples) == 1 else [f"{path}[{row}]" for row in range(len(samples))]
    answers = [predictor.answer(sample, top)["classes"] for sample in samples]
    return [{"image": name, "classes": classes} for name, classes in zip(names, answers, strict=True)]


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_ARRAY_BYTES)
    except OSError as fault:
        raise DataError(f"it cannot be read ({fault.strerror})") from fault


def _serve(options: argparse.Namespace) -> int:
    check(options.state)
    try:
        from fedkace_flwr.inference.access import Access
        from fedkace_flwr.inference.server import serve
    except ImportError as error:
        return _failed(f"{error}: the service needs the extra serve: pip install 'fedkace-flwr[serve]'")
    access = Access.of(options.allow_host, options.token_file)
    return serve(options.state, options.port, options.socket, access)


def _failed(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return _FAILED


def prediction_parser(name: str, service: str) -> Parser:
    """Return the parser of the command ``name``, which points to the command ``service``."""
    parser = Parser(prog=name, description=_DESCRIPTION, epilog=f"As a service: {service} --help")
    _add_common(parser)
    parser.add_argument(
        "images",
        type=Path,
        nargs="+",
        metavar="IMAGE",
        help="a picture of any size; for a model of arrays, JSON or .npz",
    )
    parser.add_argument("--top", type=_positive, default=3, help="number of likeliest classes to print (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def service_parser(name: str) -> Parser:
    """Return the parser of the command ``name`` that starts the service."""
    parser = Parser(prog=name, description=_SERVES)
    _add_common(parser)
    parser.add_argument("--port", type=_port, default=8080, help="port on 127.0.0.1; 0 picks one (default 8080)")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="Unix socket to listen on, in place of a port")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name under which the service is known, besides localhost; may be repeated",
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a token that requests must bear")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    what = "state folder of a client, or the folder of a model"
    parser.add_argument("--state", "--model", type=Path, required=True, metavar="DIR", help=what)
    parser.add_argument("--threads", type=_positive, default=1, help="CPU threads per answer (default 1)")


def _positive(text: str) -> int:
    return _within(text, 1, 10**6)


def _port(text: str) -> int:
    return _within(text, 0, 65535)


def _within(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from {low} to {high}")
    return int(text)


_DESCRIPTION = "Classify pictures with the model that a client currently predicts with, or with an exported one."
_SERVES = "Serve predictions over HTTP: POST /predict with a picture, GET /model, GET /health, GET /metrics."

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
