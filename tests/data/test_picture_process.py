"""Pictures of inboxes in a process of their own: the same pixels, and no picture harms more than itself."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from support.made import bombs
from support.made.inboxes import CLASSES, SIZE, drop, names_in, opened
from support.made.models import blank, picture

from fedkace_flwr.data import picture_process
from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.data.picture_process import Limits, PictureProcess
from fedkace_flwr.errors import DataError
from fedkace_flwr.samples import Form
from fedkace_flwr.sources import read_folder
from fedkace_flwr.storage import encryption

FRAMING = Framing.of_files(16)
_PATIENT = Limits(seconds=60.0)  # for tests about memory, on a busy machine


@pytest.fixture
def decoder() -> Iterator[PictureProcess]:
    with PictureProcess(_PATIENT) as process:
        yield process


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_what_is_decoded_apart_is_what_is_decoded_here(decoder: PictureProcess) -> None:
    for framing in (FRAMING, Framing.of_files(24, 27), Framing.of_arrays(8)):
        made = [picture(kind, size) for kind, size in (("PNG", (61, 97)), ("JPEG", (31, 31)), ("WEBP", (200, 3)))]
        for content in (*made, picture("PNG", (1, 1)), picture("PNG", (61, 97), "I;16"), blank(40, 30, "L", 8)):
            assert np.array_equal(decoder.square(content, framing), read_square(content, framing))


@pytest.mark.parametrize(
    "content",
    [b"", b"GIF89a", picture("PNG")[:60], blank(4097, 3072)],
    ids=["nothing", "another format", "cut short", "too large"],
)
def test_what_is_refused_here_is_refused_apart_in_the_same_words(decoder: PictureProcess, content: bytes) -> None:
    with pytest.raises(DataError) as here:
        read_square(content, FRAMING)
    with pytest.raises(DataError, match=f"^{re.escape(str(here.value))}$"):
        decoder.square(content, FRAMING)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["1", "I;16", "RGBA"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_the_largest_pictures_fit_the_memory_that_they_are_promised(
    mode: str, orientation: int, decoder: PictureProcess
) -> None:
    content = blank(4096, 3072, mode, orientation) + bytes(
        60 * 2**20
    )  # what follows a picture's end is ignored, and takes memory
    assert (decoder.square(content, FRAMING) == 0).all()


def test_a_picture_that_takes_too_much_time_is_refused_and_the_next_one_is_decoded() -> None:
    with PictureProcess(Limits(seconds=0.05)) as decoder:
        for _ in range(2):
            with pytest.raises(DataError, match="takes too much time or memory"):
                decoder.square(bombs.chunks(8_000_000), FRAMING)
            assert decoder.square(picture(), FRAMING).shape == (3, 16, 16)


def test_memory_beyond_the_limit_is_refused_by_the_system() -> None:
    """The decoder believes that it may take much, and the system gives it little."""
    with PictureProcess(replace(_PATIENT, memory=2**21)) as decoder:
        with pytest.raises(DataError):
            decoder.square(bombs.blank(1500, 1400, "PNG"), FRAMING)
        assert decoder.square(picture(), FRAMING).shape == (3, 16, 16)


def test_a_picture_that_makes_its_decoder_crash_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it met a fault in a library; a decoder is killed while it has a picture."""
    (tmp_path / "new" / "b").mkdir(parents=True)
    for name in ("a.png", "b.png", "c.png"):
        Image.new("RGB", (SIZE, SIZE), (1 if name == "b.png" else 4, 0, 0)).save(tmp_path / "new" / "b" / name)
    drop(tmp_path, "d.npz", 2)
    asked, sizes = picture_process._asked, list[int]()

    def killing(connection: Any, content: bytes, framing: Framing, patience: float) -> Any:
        sizes.append(framing.size)
        if sizes.count(SIZE) == 2 and sizes[-1] == SIZE:
            children()[-1].send_signal(signal.SIGSEGV)
        return asked(connection, content, framing, patience)

    monkeypatch.setattr(picture_process, "_asked", killing)
    images, labels = opened(tmp_path).take(1, 0)
    assert images[:, 0, 0, 0].tolist() == [4, 4, 2] and labels.tolist() == [1, 1, 2]
    assert "rejected/b.png" in names_in(tmp_path)
    assert "crash" in (tmp_path / "rejected" / "b.png.reason.txt").read_text()


def test_a_process_that_cannot_be_started_costs_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new" / "b").mkdir(parents=True)
    (tmp_path / "new" / "b" / "a.png").write_bytes(picture())
    with monkeypatch.context() as patch:
        patch.setattr(picture_process, "_MODULE", "fedkace_flwr.no_such_module")
        with pytest.raises(DataError, match=r"cannot be used \(\[Errno 5\] the process that decodes pictures does not"):
            opened(tmp_path).take(1, 0)
    assert not any(name.startswith("rejected/") for name in names_in(tmp_path))
    assert len(opened(tmp_path).take(1, 0)[1]) == 1


def test_a_decoder_that_is_killed_is_replaced(decoder: PictureProcess) -> None:
    decoder.square(picture(), FRAMING)
    for process in children():
        process.kill()
    with pytest.raises(DataError, match="crash"):
        decoder.square(picture(), FRAMING)
    assert decoder.square(picture(), FRAMING).shape == (3, 16, 16)


def test_a_decoder_ignores_the_signals_that_end_its_client(decoder: PictureProcess) -> None:
    """systemd and a terminal send them to all processes; requests in progress still need the decoder."""
    decoder.square(picture(), FRAMING)
    before = children()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        before[-1].send_signal(number)
    assert decoder.square(picture(), FRAMING).shape == (3, 16, 16)
    assert children() == before


@pytest.mark.slow
def test_a_decoder_loads_nothing_that_it_does_not_need() -> None:
    code = "import sys, fedkace_flwr.data.picture_process; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "flwr", "starlette", "uvicorn", "asyncio"} & set(done.stdout.split())


def test_files_of_a_test_set_are_decoded_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.png").write_bytes(picture())
    assert read_folder(tmp_path, CLASSES, Form.picture(SIZE))[1].tolist() == [1]
    monkeypatch.setattr(picture_process, "_MODULE", "fedkace_flwr.no_such_module")
    with pytest.raises(DataError, match="the process that decodes pictures does not work"):
        read_folder(tmp_path, CLASSES, Form.picture(SIZE))


def test_no_process_is_left_behind_and_none_starts_without_pictures(tmp_path: Path) -> None:
    before = set(children())
    drop(tmp_path, "a.npz", 1)
    with PictureProcess() as decoder:
        assert set(children()) == before
        decoder.square(picture(), FRAMING)
        started = set(children()) - before
        assert len(started) == 1
    psutil.wait_procs(started, timeout=60)  # the decoder may still be ending
    assert not [process for process in started if process.is_running()]


def test_the_process_has_neither_keys_nor_open_files_of_the_client(
    decoder: PictureProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (encryption.VARIABLE, encryption.MODELS):
        monkeypatch.setenv(name, "c2VjcmV0")
    with Path(os.devnull).open("rb") as file:
        os.set_inheritable(file.fileno(), True)
        decoder.square(picture(), FRAMING)
        for process in children():
            assert not [name for name in process.environ() if name.startswith("FEDKACE_")]
            # An app that a SuperNode has received is not installed; the process must find it all the same.
            assert Path(process.environ()["PYTHONPATH"].split(os.pathsep)[0], "fedkace_flwr").samefile(
                Path(picture_process.__file__).parents[1]
            )
            assert process.num_fds() <= 5, process.open_files()
