"""The card of a model: what it is, what it was trained on, how well it did, and what it is not for.

It is Markdown with a YAML head, as the Hugging Face Hub shows it. Names of data sets and classes are other people's
text, and are escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

import fedkace_flwr
from fedkace_flwr.config import Config, folder_keys, keys_affecting, path_keys
from fedkace_flwr.inference.kept_models import KeptModels
from fedkace_flwr.results.record import accuracy_so_far, defence_note, defended, known
from fedkace_flwr.storage.names import in_markdown

_TAGS = ["federated-learning", "continual-learning", "flower"]
_SOFTWARE = "fedkace-flwr"
_ONNX = "`model.onnx` holds the same model for other programs: {}, become `probabilities`, float32 (n, C)."
_ONNX_INPUTS = ("`images`, uint8 (n, 3, S, S)", "`arrays`, float32 (n, ...)")


_LOADING = f"""## How to load it

```bash
pip install {_SOFTWARE}
```

```python
from fedkace_flwr import load_model

predictor = load_model("model")  # the folder of this file
labels, probabilities = predictor.predict({{given}})
```

`config.json` says how {{one}} becomes the network's input."""
_GIVEN = {"image": '["picture.png"]', "sample": "samples"}


def _noun(kept: KeptModels) -> str:
    """What a sample is called."""
    return "image" if kept.framing else "sample"


@dataclass(frozen=True)
class _DataSet:
    """What is known of a data set: a line about its origin, its licence, and its name on the Hub."""

    origin: str
    licence: str
    hub: str = ""


_DATA_SETS = {
    "digits": _DataSet(
        "scikit-learn's copy of the test split of *Optical Recognition of Handwritten Digits* (E. Alpaydin and "
        "C. Kaynak, UCI Machine Learning Repository, 1998)",
        "CC BY 4.0",
    ),
    "wine": _DataSet(
        "scikit-learn's copy of *Wine* (S. Aeberhard and M. Forina, UCI Machine Learning Repository, 1992)", "CC BY 4.0"
    ),
    "cifar10": _DataSet(
        "CIFAR-10 (A. Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009)",
        "none stated by its author",
        "uoft-cs/cifar10",
    ),
    "cifar100": _DataSet(
        "CIFAR-100 (A. Krizhevsky, *Learning Multiple Layers of Features from Tiny Images*, 2009)",
        "none stated by its author",
        "uoft-cs/cifar100",
    ),
    "mnist": _DataSet(
        "files of MNIST's names and format; those of MNIST itself (Y. LeCun, C. Cortes and C. J. C. Burges) or of a data "
        "set that is distributed in its place",
        "MNIST's authors state none",
    ),
    "emnist": _DataSet(
        "EMNIST (G. Cohen et al., *EMNIST: an extension of MNIST to handwritten letters*, 2017), from NIST Special "
        "Database 19",
        "none stated by its authors",
    ),
    "imagenet100": _DataSet(
        "classes of ILSVRC2012 (O. Russakovsky et al., *ImageNet Large Scale Visual Recognition Challenge*, 2015)",
        "ImageNet's terms of access: non-commercial research and education",
        "ILSVRC/imagenet-1k",
    ),
}
_UNKNOWN = "unknown to the program; ask whoever provided them"
_OWN = _DataSet("data that the program knows nothing about", _UNKNOWN)


@dataclass(frozen=True)
class Training:
    """The run that a model comes from.

    Attributes
    ----------
    config : Config
        Its configuration.
    rounds : sequence of mapping
        The records of its rounds up to the model's.
    """

    config: Config
    rounds: Sequence[Mapping[str, Any]]


def card(kept: KeptModels, training: Training | None = None, *, onnx: bool = False) -> str:
    """Return the text of the card.

    Parameters
    ----------
    kept : KeptModels
        The model.
    training : Training, optional
        The run that it comes from; without it the card says less.
    onnx : bool
        Whether ``model.onnx`` lies beside it.
    """
    parts = [_head(kept, training), _what(kept, training), f"## Model\n\n{_table(('', ''), _model(kept).items())}"]
    if training:
        parts += [
            f"## Training data\n\n{_table(('', ''), _data(kept, training).items())}",
            _results(training, _noun(kept)),
        ]
    parts += [
        _use(kept, training),
        _loading(kept) + (f"\n\n{_onnx(kept)}" if onnx else ""),
        _classes(kept),
        _licences(training),
    ]
    if training:
        parts.append(_configuration(training.config))
    return "\n\n".join(parts) + "\n"


def with_onnx(text: str, kept: KeptModels, *, onnx: bool) -> str:
    """Return a card that says of ``model.onnx`` whether it is there."""
    for told in map(_ONNX.format, _ONNX_INPUTS):
        text = text.replace(f"\n\n{told}", "")
    return f"{text.rstrip()}\n\n{_onnx(kept)}\n" if onnx else text


def _onnx(kept: KeptModels) -> str:
    return _ONNX.format(_ONNX_INPUTS[0 if kept.framing else 1])


def _loading(kept: KeptModels) -> str:
    noun = _noun(kept)
    return _LOADING.format(given=_GIVEN[noun], one=f"{'an' if kept.framing else 'a'} {noun}")


def _head(kept: KeptModels, training: Training | None) -> str:
    hub = _data_set(training.config).hub if training else ""
    task = "image-classification" if kept.framing else "tabular-classification" if len(kept.shape) == 1 else ""
    told: dict[str, Any] = {
        "library_name": _SOFTWARE,
        **({"pipeline_tag": task} if task else {}),
        "tags": [*_TAGS, *([task] if task else []), kept.method, kept.network],
        **({"datasets": [hub]} if hub else {}),
    }
    return f"---\n{yaml.safe_dump(told, sort_keys=False)}---"


def _what(kept: KeptModels, training: Training | None) -> str:
    dataset = of_rounds = ""
    if training:
        dataset = f" on {in_markdown(_name_of_data(training.config))}"
        of_rounds = f" of {training.config.stream.rounds}" if training.config.stream.rounds else ""
        whose = "the global model of the federation"
    else:
        how = "answers" if len(kept.answers) == 1 else "answers together"
        whose = f"what one client of the federation {how} with: {_answering(kept)}"
    return (
        f"# {in_markdown(kept.method)}{dataset}, round {kept.round}\n\n"
        f"A classifier of {_noun(kept)}s, trained by streaming federated continual learning: clients receive their data "
        f"in chunks and share no {_noun(kept)}s. It is {whose}, after round {kept.round}{of_rounds}."
    )


def _answering(kept: KeptModels) -> str:
    (*names, last) = [in_markdown(name) for name in kept.answers]
    if not names:
        return f"the model *{last}*"
    return f"the mean of the probabilities of the models *{', '.join(names)} and {last}*"


def _model(kept: KeptModels) -> dict[str, str]:
    size = sum(array.size for name in kept.answers for array in kept.weights[name].values())
    shares = [f"{in_markdown(name)} {share:.3f}" for name, share in kept.shares.items()]
    return {
        "method": in_markdown(kept.method),
        "network": f"{in_markdown(kept.network)}, width {kept.width}, stem {in_markdown(kept.stem)}",
        "networks in the file": str(len(kept.answers)),
        "numbers in the file": f"{size:,}",
        "input": _input(kept),
        "output": f"probabilities of {len(kept.class_names)} classes, of which {len(kept.seen)} have been met",
        **({"views": "also the mirror image of each image"} if kept.mirrored else {}),
        **({"weights in the mean, for each view": ", ".join(shares)} if shares else {}),
        **({"switched to the global model in round": str(kept.switched_at)} if kept.switched_at else {}),
    }


def _input(kept: KeptModels) -> str:
    if kept.framing:
        return f"RGB images of {kept.framing.size} x {kept.framing.size} pixels"
    return f"arrays of shape ({', '.join(map(str, kept.shape))}), float32"


def _data(kept: KeptModels, training: Training) -> dict[str, str]:
    config = training.config
    found, stream = _data_set(config), config.stream
    chunks = (
        f"{config.chunks}, {stream.samples_per_class} new {_noun(kept)}s per class and round" if config.chunks else ""
    )
    return {
        "data set": in_markdown(_name_of_data(config)),
        "origin": found.origin,
        "licence of the data": found.licence,
        "clients": str(_clients(training)),
        "rounds": f"{kept.round} of {stream.rounds}" if stream.rounds else str(kept.round),
        **({"chunks of a client": chunks} if chunks else {}),
        f"{_noun(kept)}s that a client may store": str(config.buffer.capacity),
    }


def _clients(training: Training) -> int:
    """Return the number of clients, including those that have joined."""
    last = training.rounds[-1] if training.rounds else {}
    return max(training.config.stream.clients, len(last.get("client_accuracy") or ()))


def _results(training: Training, noun: str) -> str:
    rounds = training.rounds
    last: Mapping[str, Any] = rounds[-1] if rounds else {}
    own = known(last.get("global_accuracy", ()))
    over = "all" if training.config.stream.rounds else f"the last {len(rounds)}"  # a run without end keeps no more
    rows = {
        f"average accuracy over {over} rounds (AA)": _percent(accuracy_so_far(rounds)),
        "accuracy after the last round": _percent(last.get("accuracy")),
        "accuracy of guessing among the classes met": _percent(last.get("chance")),
        f"accuracy of this model, where clients tested it ({len(own)} of {_clients(training)})": _percent(
            sum(own) / len(own) if own else None
        ),
    }
    if last.get("epsilon") is not None and last.get("delta") is not None:
        rows["epsilon of differential privacy"] = f"{last['epsilon']:.3g} (delta = {last['delta']:g})"
    note = defence_note(*defended(rounds))
    return (
        f"## Results\n\n{_table(('', ''), rows.items())}\n\n"
        + (f"{note.capitalize()}. " if note else "")
        + f"An accuracy is the mean over clients, each on the test {noun}s of the classes that it has met, with the model "
        "that it predicts with. That need not be the global model: a client may predict with its local one, or with "
        "both. The last row is the mean over the clients that tested the global model, as they use it."
    )


def _use(kept: KeptModels, training: Training | None) -> str:
    seen, noun = set(kept.seen), _noun(kept)
    unmet = [in_markdown(name) for label, name in enumerate(kept.class_names) if label not in seen]
    limits = [
        f"It answers with one of its classes whatever the {noun} shows, and knows only {noun}s like those that it was "
        "trained on.",
        "Its probabilities have not been calibrated. Nobody has examined whether it errs more often for some groups of "
        "people or things than for others. Do not base decisions about people on it.",
        f"A model can reveal something about the {noun}s that it was trained on, such as whether one was among them.",
    ]
    if unmet:
        limits.append(f"These classes had not been met and are never predicted: {', '.join(unmet)}.")
    if training:
        if training.config.data.arrives:
            limits.append("The server does not know which of the classes the clients have met.")
        if changes := _changes(training.config):
            limits.append(f"Clients of this run changed the model before they predicted with it ({changes}).")
    return (
        "## Intended use and limits\n\n"
        f"Research on federated continual learning, and classification of {noun}s like those that it was trained on.\n\n"
        + "\n".join(f"- {text}" for text in limits)
    )


def _changes(config: Config) -> str:
    answers = config.answers
    asked = {
        "recalibrate-batchnorm": "true" if answers.recalibrate_batchnorm else "",
        "classifier": answers.classifier if answers.classifier != "trained" else "",
        "test-time-augmentation": "mirrored" if answers.test_time_augmentation == "mirrored" else "",
        "predict-with": answers.predict_with if answers.averages else "",
    }
    return ", ".join(f"`{key} = {value}`" for key, value in asked.items() if value)


def _classes(kept: KeptModels) -> str:
    met = set(kept.seen)
    rows = [
        (str(label), in_markdown(name), "yes" if label in met else "no") for label, name in enumerate(kept.class_names)
    ]
    return f"## Classes\n\n{_table(('label', 'name', 'met'), rows)}"


def _licences(training: Training | None) -> str:
    data = _data_set(training.config).licence if training else _OWN.licence
    return (
        "## Licences\n\n"
        f"- The software, {_SOFTWARE} {fedkace_flwr.__version__}: Apache-2.0.\n"
        f"- The data: {data}.\n"
        "- The weights: none is given here. Whoever publishes them chooses one that the licence of the data permits."
    )


def _configuration(config: Config) -> str:
    wanted = keys_affecting("numbers") - config.ignored - folder_keys()
    files = path_keys()
    rows = [
        (f"`{key}`", in_markdown(PurePath(str(value)).name if key in files else _shown(value)))
        for key, value in config.flat().items()
        if key in wanted
    ]
    return f"## Configuration\n\n{_table(('key', 'value'), rows)}"


def _data_set(config: Config) -> _DataSet:
    if config.data.arrives:
        return _OWN
    if config.data.hub_name:
        name = config.data.hub_name.partition("@")[0]
        return _DataSet(f"{in_markdown(name)} on the Hugging Face Hub", "see its page on the Hub", name)
    source = config.data.source
    return _DATA_SETS.get("emnist" if source.startswith("emnist-") else source, _OWN)


def _name_of_data(config: Config) -> str:
    return "files of its devices" if config.data.arrives else config.data.name


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.2f} %"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
