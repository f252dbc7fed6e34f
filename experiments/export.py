"""``export``: a model to take away, from a run, from a client, or from another model's folder."""

from dataclasses import dataclass
from pathlib import Path

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError, MissingDataError, ModelError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.results.folders import all_within, runs_of_study, within
from fedkace_flwr.experiments.results.reading import with_data_dir
from fedkace_flwr.experiments.results.recorded import Run
from fedkace_flwr.export.card import Training
from fedkace_flwr.export.folder import ADAPTERS, CARD, HOLDS, ONNX, packed_adapters, write_folder
from fedkace_flwr.export.global_model import global_model, why_silent
from fedkace_flwr.export.onnx_file import check_installed, to_onnx
from fedkace_flwr.inference.kept_models import MODEL, TENSORS, KeptModels
from fedkace_flwr.inference.model_files import load_newest, read_model
from fedkace_flwr.rounds.class_names import CLASSES, ClassNames
from fedkace_flwr.storage import targets
from fedkace_flwr.storage.checkpoint import LARGEST_CHECKPOINT, Checkpoints
from fedkace_flwr.storage.files import read_bytes, read_text
from fedkace_flwr.storage.names import closest_path


@dataclass(frozen=True)
class _Source:
    """What is exported.

    Attributes
    ----------
    kept : KeptModels
        The model.
    training : Training or None
        The run that it comes from, if that is known.
    card : str or None
        A card that it has already.
    adapters : bytes
        The file of its adapters; empty if it has none, or if its source has them only within the weights.
    """

    kept: KeptModels
    training: Training | None = None
    card: str | None = None
    adapters: bytes = b""


def export(source: Path, target: Path, *, onnx: bool = False, data_dir: Path | None = None) -> list[str]:
    """Write a model's folder, and return what to tell about it, line by line.

    Parameters
    ----------
    source : Path
        The folder of a run, finished or not; the state folder of a client; or the folder of a model.
    target : Path
        The folder to write: new, empty, or that of an earlier export, which is replaced.
    onnx : bool
        Whether to write ``model.onnx`` as well.
    data_dir : Path, optional
        Folder of the data set's files, for a run that is not finished.

    Raises
    ------
    FedkaceError
        There is no model, it cannot be read or exported, or the target cannot be written.
    """
    if onnx:
        check_installed()
    targets.check(target, HOLDS)
    found = _find(source, data_dir)
    content, difference = to_onnx(found.kept) if onnx else (b"", 0.0)
    try:
        write_folder(target, found.kept, found.training, text=found.card, onnx=content, adapters=found.adapters)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written ({error.strerror or error})") from error
    kept = found.kept
    told = [f"written: {target}, the {kept.answering} model of round {kept.round}"]
    if onnx:
        told.append(f"{ONNX}: checked with onnxruntime; probabilities differ by at most {difference:.1e}")
    return told


def _find(source: Path, data_dir: Path | None) -> _Source:
    if source.is_file() or (source / TENSORS).exists():
        card = source / CARD
        text = _text(within(source, card)) if card.exists() else None
        return _Source(read_model(source), card=text, adapters=_adapters(source))
    if not source.is_dir():
        hint = closest_path(source)
        raise ModelError(
            f"{source}: there is no such folder; must be that of a run, of a client's state or of a model{hint}"
        )
    if (source / "config.json").exists():
        return _of_run(source, data_dir)
    if runs := runs_of_study(source):
        names = ", ".join(path.name for path in runs[:4])
        raise ModelError(f"{source}: is the folder of a study; name that of a run in it, such as {names}")
    return _Source(load_newest(all_within(source, source)).kept)


def _of_run(source: Path, data_dir: Path | None) -> _Source:
    try:
        method, config = configured(Run(source).config())
    except ConfigError as error:
        raise ModelError(f"{source / 'config.json'}: {error}") from error
    if reason := method.strategy(config).lacks_global_model():
        raise ModelError(
            f"{source}: method = {config.method!r} has no global model, since {reason}; name a client's folder, such "
            f"as {source / 'clients' / 'client-000'}, which holds models if the run had keep-models = always"
        )
    if (source / "summary.json").exists() and (source / MODEL / TENSORS).exists():
        folder = all_within(source, source / MODEL)
        kept, adapters = read_model(folder), _adapters(folder)
    else:
        kept, adapters = _of_checkpoint(source, config, data_dir)
    records = Run(source).rounds(config.stream.clients)
    training = Training(config, [record for record in records if record["round"] <= kept.round])
    return _Source(kept, training, adapters=adapters)


def _of_checkpoint(source: Path, config: Config, data_dir: Path | None) -> tuple[KeptModels, bytes]:
    checkpoint = Checkpoints(all_within(source, source / "server")).newest()
    if checkpoint is None:
        raise ModelError(f"{source}: has no checkpoint in server/; no round has been finished, or it is a copy")
    try:
        experiment = Experiment(with_data_dir(config, data_dir), download=False)
    except MissingDataError as error:
        raise ModelError(f"{error}; its classes must be known: name its folder with --data-dir") from error
    agreed: tuple[str, ...] = ()
    if config.data.grows:
        classes = ClassNames(config.data)
        classes.restore(checkpoint.record.get(CLASSES, {}))
        agreed = classes.agreed.names_in(checkpoint.round)
    if reason := why_silent(experiment, agreed):
        raise ModelError(f"{source}: {reason}; name a client's folder, which holds models if keep-models was always")
    kept = global_model(experiment, checkpoint.weights, checkpoint.round, agreed)
    return kept, packed_adapters(checkpoint.weights)


def _adapters(folder: Path) -> bytes:
    path = folder / ADAPTERS
    try:
        return read_bytes(within(folder, path), LARGEST_CHECKPOINT) if path.exists() else b""
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
