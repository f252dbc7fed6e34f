"""Files that are read with a bound and replaced as a whole, and the folders that hold them."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.made.results import made_round
from support.made.stored import assert_same, empty, heard, learned, names, read_state, train

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import CACHE, load_dataset
from fedkace_flwr.errors import ConfigError, FedkaceError, RunError, StateError, UnreadableStateError
from fedkace_flwr.experiments.feed import feed
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.experiments.studies.study import load_study
from fedkace_flwr.results.reference_cache import cached_accuracy
from fedkace_flwr.results.run_folder import HOLDS, RunFolder, read_json
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.storage import atomic, encryption, files
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.storage.targets import claim

Make = Callable[..., Config]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


pytestmark = pytest.mark.timeout(120)


# Replacing


def linked(partial: Path, target: Path) -> None:
    target.write_text("theirs")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.symlink_to(target)


def _of_a_run(folder: Path, make: Make) -> Path:
    run = RunFolder(folder / "run")
    linked(folder / "run" / "config.json.partial", folder / "theirs")
    linked(folder / "run" / "accuracy.png", folder / "theirs")
    run._write("config.json", {"schema": 1})
    run.close()
    return folder / "run" / "config.json"


def _of_a_reference(folder: Path, make: Make) -> Path:
    config = make()
    cached_accuracy(config, 0, 1, lambda: 0.5)
    (path,) = (folder / "cache").rglob("*.json")
    path.unlink()
    linked(path.with_suffix(f".{os.getpid()}.partial"), folder / "theirs")
    assert cached_accuracy(config, 0, 1, lambda: 0.5) == 0.5
    return path


def _of_a_study(folder: Path, make: Make) -> Path:
    (folder / "trial.yaml").write_text("config: {dataset: digits}\n")
    study = load_study(folder / "trial.yaml", {}, folder / "results")
    linked(study.folder / f"study.{os.getpid()}.partial", folder / "theirs")
    runner.describe(study)
    return study.folder / "study.json"


def _of_a_fed_inbox(folder: Path, make: Make) -> Path:
    claim(folder / "inboxes", "inboxes")
    linked(folder / "inboxes" / "client-0" / "new" / ".chunk-000001.npz.part", folder / "theirs")
    feed(make(clients=1, rounds=1), folder / "inboxes")
    return folder / "inboxes" / "client-0" / "new" / "chunk-000001.npz"


def _of_a_state(folder: Path, make: Make) -> Path:
    linked(folder / "client" / "state-000001.npz.partial", folder / "theirs")
    (folder / "client").chmod(0o700)
    train(ClientStore(folder / "client", empty()), 1)
    return folder / "client" / "state-000001.npz"


WRITERS = [_of_a_run, _of_a_reference, _of_a_study, _of_a_fed_inbox, _of_a_state]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.strip("_").replace("_", " "))
def test_a_link_in_the_place_of_a_half_written_file_is_not_followed(
    write: Callable[[Path, Make], Path], tmp_path: Path, small: Make
) -> None:
    written = write(tmp_path, small)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert written.is_file() and not written.is_symlink() and written.stat().st_size


@pytest.mark.parametrize("name", ["rounds.jsonl", "accuracy.png", "summary.json", "config.json"])
def test_a_link_in_the_place_of_a_runs_file_is_not_written_through(
    name: str, tmp_path: Path, small: Make, pictures: None
) -> None:
    config = small(rounds=1)
    folder = RunFolder(tmp_path / "run")
    linked(tmp_path / "run" / name, tmp_path / "theirs")
    try:
        folder._write("config.json", config.flat())
        folder.add_round(made_round(1, 0.5, clients=3))
        folder.finish(config)
    except RunError as error:
        assert name == "rounds.jsonl" and "cannot be written" in str(error)
    finally:
        folder.close()
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.usefixtures("pictures", "cache")
def test_a_link_in_the_place_of_a_prepared_data_set_is_removed_and_not_followed(tmp_path: Path) -> None:
    config = DataConfig(dataset="digits")
    load_dataset(config)
    (prepared,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    prepared.rename(tmp_path / "away")
    prepared.with_name(f"{prepared.name}.partial").symlink_to(theirs)
    assert len(load_dataset(config).labels) == 1797
    assert (theirs / "file").read_text() == "theirs"


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    claim(tmp_path / "run", HOLDS)
    linked(tmp_path / "run" / ".lock", tmp_path / "theirs")
    linked(tmp_path / "client" / ".lock", tmp_path / "theirs")
    (tmp_path / "client").chmod(0o700)
    with pytest.raises(RunError, match=r"run/\.lock cannot be locked") as caught:
        RunFolder(tmp_path / "run")
    assert "\n" not in str(caught.value)
    with pytest.raises(StateError, match="cannot be written"):
        train(ClientStore(tmp_path / "client", empty()), 1)
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_writers_at_the_same_time_do_not_mix_their_files(tmp_path: Path) -> None:
    path, faults = tmp_path / "file", list[BaseException]()
    contents = [bytes([number]) * 200_000 for number in range(6)]

    def write(content: bytes) -> None:
        try:
            for _ in range(10):
                files.write_bytes(path, content[:100_000], content[100_000:])
        except BaseException as error:  # seen by the test, not by the thread
            faults.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert path.read_bytes() in contents
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_write_that_is_interrupted_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write_text(path, "old")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.write_text(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "old")]


def test_what_killed_processes_left_of_a_run_goes_when_it_begins_again(tmp_path: Path, small: Make) -> None:
    folder = RunFolder(tmp_path / "run")
    for name in ("config.json.0a1b2c3d.partial", "summary.json.partial"):
        (tmp_path / "run" / name).write_text("half")
    (tmp_path / "run" / "theirs.partial").mkdir()
    folder.begin(small(), torch.device("cpu"), "token")
    folder.close()
    assert sorted(path.name for path in (tmp_path / "run").glob("*.partial")) == ["theirs.partial"]


# Reading


@pytest.fixture
def sparse(tmp_path: Path) -> Callable[[Path], Path]:
    """Make a file that claims two gigabytes and takes no room."""

    def make(path: Path) -> Path:
        with path.open("wb") as file:
            file.truncate(2**31)
        return path

    return make


Sparse = Callable[[Path], Path]


def test_a_state_of_gigabytes_is_refused_unread_and_left_alone(tmp_path: Path, sparse: Sparse) -> None:
    train(ClientStore(tmp_path, empty()), 1)
    path = sparse(tmp_path / "state-000002.npz")
    store = ClientStore(tmp_path, empty())
    for action in (lambda: store.before(3), lambda: store.answer(2), lambda: read_state(path)):
        with pytest.raises(
            UnreadableStateError, match="it has 2147483648 bytes; at most 1073741824 are read"
        ) as caught:
            action()
        assert str(path) in str(caught.value) and "FEDKACE_STATE_LIMIT to at least 2048" in str(caught.value)
    assert path.stat().st_size == 2**31
    path.unlink()
    assert_same(store.before(3), learned(1))


def test_an_answer_a_record_and_a_checkpoint_of_gigabytes_are_refused_unread(tmp_path: Path, sparse: Sparse) -> None:
    with pytest.raises(UnreadableStateError, match="2147483648 bytes"):
        atomic.run_of(sparse(tmp_path / "state-000001.npz"))
    with pytest.raises(UnreadableStateError, match="2147483648 bytes"):
        atomic.read(sparse(tmp_path / "answer-000001.npz"))
    with (tmp_path / "checkpoint-000001.npz").open("wb") as file:
        file.truncate(2**35)
    with pytest.raises(RunError, match=r"checkpoint-000001\.npz: it has 34359738368 bytes"):
        Checkpoints(tmp_path).newest()


def test_the_limit_can_be_set_and_holds_for_writing_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, large = ClientStore(tmp_path, empty()), learned(2, size=200_000)
    train(store, 1)
    monkeypatch.setenv(atomic.LIMIT, "1")
    with pytest.raises(StateError, match=r"state-000002\.npz: would have \d+ bytes, and at most 1048576 are read"):
        store.save(large)
    assert names(tmp_path) == ["answer-000001.npz", "state-000001.npz"]
    monkeypatch.setenv(atomic.LIMIT, "64")
    store.save(large)
    assert_same(store.before(3), large)
    monkeypatch.setenv(atomic.LIMIT, "1")
    with pytest.raises(UnreadableStateError, match="at most 1048576 are read"):
        store.before(3)


@pytest.mark.parametrize("key", ["", "A" * 43 + "="])
def test_what_may_be_written_may_be_read(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of the file, not of what is in it."""
    monkeypatch.setenv(encryption.VARIABLE, key)
    path = tmp_path / "state-000001.npz"
    atomic.write(path, {}, {})
    most = path.stat().st_size
    atomic.write(path, {}, {}, most=most)
    assert atomic.read(path, most=most) is not None
    with pytest.raises(StateError, match=f"would have {most} bytes, and at most {most - 1} are read"):
        atomic.write(path, {}, {}, most=most - 1)


@pytest.mark.parametrize("text", ["0", "x", "1.5", "9" * 40])
def test_a_limit_that_is_none_is_refused_before_anything_is_done(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(atomic.LIMIT, text)
    with pytest.raises(ConfigError, match=r"FEDKACE_STATE_LIMIT = .*: must be a whole number of MiB"):
        train(ClientStore(tmp_path / "client", empty()), 1)
    assert list(tmp_path.iterdir()) == []


def _config(folder: Path) -> object:
    return read_json(folder / "config.json")


def _results(folder: Path) -> object:
    return load_results(folder)


def _cell(folder: Path) -> object:
    return Cell("run", Config.parse({"results-dir": str(folder.parent)})).rounds


@pytest.mark.parametrize(
    ("name", "read", "kind"),
    [("config.json", _config, "sparse"), ("rounds.jsonl", _results, "pipe"), ("rounds.jsonl", _cell, "sparse")],
)
def test_a_file_of_a_run_that_is_huge_or_none_is_refused_unread(
    name: str, read: Callable[[Path], object], kind: str, tmp_path: Path, sparse: Sparse, small: Make
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    sparse(folder / name) if kind == "sparse" else os.mkfifo(folder / name)
    with pytest.raises((FedkaceError, OSError), match=r"not a regular file|it has 2147483648 bytes") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("cache")
def test_a_cached_reference_that_is_a_pipe_is_computed_again(tmp_path: Path, small: Make) -> None:
    config = small()
    cached_accuracy(config, 0, 1, lambda: 0.5)
    (path,) = (tmp_path / "cache").rglob("*.json")
    path.unlink()
    os.mkfifo(path)
    assert cached_accuracy(config, 0, 1, lambda: 0.25) == 0.25
    assert cached_accuracy(config, 0, 1, lambda: 0.75) == 0.25


def test_a_log_that_grows_while_it_is_read_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    real = os.fstat

    def growing(descriptor: int) -> os.stat_result:
        facts = real(descriptor)
        with path.open("a") as file:
            file.write("more\n")
        return facts

    monkeypatch.setattr(os, "fstat", growing)
    text = files.read_text(path, 1000)
    assert text.startswith("one\n") and len(text) < 20


def test_deeply_nested_json_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(RunError, match=r"config\.json cannot be read") as caught:
        read_json(tmp_path / "config.json")
    assert "\n" not in str(caught.value)


# Folders


@pytest.fixture
def open_umask() -> Any:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_what_holds_clients_images_is_for_its_user_alone(tmp_path: Path, small: Make) -> None:
    train(ClientStore(tmp_path / "results" / "run" / "clients" / "client-000", empty()), 1)
    RunFolder(tmp_path / "others" / "first").close()
    Checkpoints(tmp_path / "others" / "first" / "server").save(Checkpoint(1, "1", {}))
    feed(small(clients=1, rounds=1), tmp_path / "inboxes")
    cell = Cell("one", Config.parse({"results-dir": str(tmp_path / "study")}))
    cell.prepare()
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) >= 10
    assert {path: path.stat().st_mode & 0o777 for path in made} == dict.fromkeys(made, 0o700)
    private = [*tmp_path.rglob("*.npz")]
    assert len(private) == 5
    assert {path: path.stat().st_mode & 0o777 for path in private} == dict.fromkeys(private, 0o600)


@pytest.mark.usefixtures("open_umask")
def test_a_results_folder_that_exists_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o750)
    RunFolder(tmp_path / "shared" / "run").close()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "shared" / "run").stat().st_mode & 0o777 == 0o700


def test_a_folder_left_half_written_does_not_keep_a_round_from_being_stored(tmp_path: Path) -> None:
    (tmp_path / "state-000009.npz.partial").mkdir()
    tmp_path.chmod(0o700)
    with heard() as warned:
        train(ClientStore(tmp_path, empty()), 1)
    assert warned == [] and read_state(tmp_path / "state-000001.npz").round == 1
