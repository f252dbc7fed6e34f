"""Pictures decoded in other processes: the same pixels, within limits, whatever becomes of the processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.made.models import picture
from support.systems.service import ENVIRONMENT

from experiments.bench.serving import bombs
from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.errors import DataError
from fedkace_flwr.inference import server
from fedkace_flwr.inference.bodies import MAX_BYTES, MEMORY, Bodies
from fedkace_flwr.inference.connections import Limits
from fedkace_flwr.inference.decoders import LANES, BusyError, DecoderError, Decoders, Lane, Pixels
from fedkace_flwr.storage import encryption

FRAMING = Framing.of_files(16)
_FAST = tuple(replace(lane, seconds=60.0) for lane in LANES)  # for tests about memory, on a busy machine

Decode = Callable[..., Awaitable[Pixels]]


def decoding(test: Callable[[Decode], Awaitable[None]], lanes: tuple[Lane, ...] = LANES) -> None:
    """Run a test with a function that decodes a picture."""

    async def run() -> None:
        decoders, bodies = Decoders(lanes), Bodies()

        async def decode(content: bytes, framing: Framing = FRAMING, form: str = "") -> Pixels:
            async with bodies.upload() as upload:
                await bodies.make_room(len(content))
                upload.blocks, upload.size = [bytearray(content)], len(content)
                return await decoders.square(upload, form, framing)

        try:
            await test(decode)
        finally:
            await decoders.close()

    asyncio.run(run())


def decoders() -> list[psutil.Process]:
    """The decoders of this process, and their parent first."""
    return psutil.Process().children(recursive=True)


def test_what_is_decoded_apart_is_what_is_decoded_here() -> None:
    async def test(decode: Decode) -> None:
        for framing in (FRAMING, Framing.of_files(24, 27), Framing.of_arrays(8), Framing.of_arrays(31)):
            for kind, size in (("PNG", (61, 97)), ("JPEG", (31, 31)), ("WEBP", (200, 3)), ("PNG", (1, 1))):
                content = picture(kind, size)
                assert np.array_equal(await decode(content, framing), read_square(content, framing))

    decoding(test)


def test_a_picture_climbs_to_the_lane_that_it_needs() -> None:
    """In the first lane too large, in the second too slow, in the third neither."""
    lanes = (replace(LANES[0], pixel_memory=1000), replace(LANES[1], seconds=0.0, pixel_seconds=1e-12), LANES[2])
    content = picture("PNG", (300, 300))

    async def test(decode: Decode) -> None:
        assert np.array_equal(await decode(content), read_square(content, FRAMING))
        thin = picture("PNG", (20, 1))  # its pixels are few before it is scaled, and many after
        assert np.array_equal(await decode(thin), read_square(thin, FRAMING))

    decoding(test, lanes)


def test_a_file_too_large_for_a_lane_goes_to_the_next() -> None:
    lanes = (replace(LANES[0], file=10), replace(LANES[1], file=20), LANES[2])

    async def test(decode: Decode) -> None:
        assert (await decode(picture())).shape == (3, 16, 16)

    decoding(test, lanes)


@pytest.mark.parametrize("lanes", [LANES[:1], LANES[:2]])
def test_a_picture_that_takes_too_much_time_is_refused_and_the_next_one_is_decoded(lanes: tuple[Lane, ...]) -> None:
    async def test(decode: Decode) -> None:
        for bomb, form in ((bombs.chunks(990_000), ""), (bombs.form(990_000), bombs.FORM)):
            for _ in range(2):
                with pytest.raises(DataError, match="decoding it takes too much time or memory"):
                    await decode(bomb, form=form)
                assert (await decode(picture())).shape == (3, 16, 16)

    decoding(test, lanes)


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_memory_beyond_the_limit_is_refused_by_the_system(kind: str) -> None:
    """The decoder believes that it may take much, and the system gives it little."""
    lanes = tuple(replace(lane, memory=2**20) for lane in _FAST)
    large = bombs.blank(1500, 1400, kind)

    async def test(decode: Decode) -> None:
        with pytest.raises(DataError, match=r"too much time or memory|it is damaged"):
            await decode(large)
        assert (await decode(picture(kind))).shape == (3, 16, 16)

    decoding(test, lanes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        ("PNG", (4096, 3072), {}),
        ("PNG", (3547, 3547), {}),
        ("JPEG", (4096, 3072), {"progressive": True, "subsampling": 0}),
        ("WEBP", (2643, 2643), {"method": 1}),
        ("WEBP", (2643, 2643), {"lossless": True}),
    ],
)
@pytest.mark.parametrize("framing", [FRAMING, Framing.of_arrays(8)], ids=["files", "arrays"])
def test_the_largest_pictures_fit_the_memory_that_they_are_promised(
    kind: str, size: tuple[int, int], options: dict[str, Any], framing: Framing
) -> None:
    made = bombs.photo if options.get("method") or kind == "JPEG" else bombs.blank
    content = made(*size, kind, **options)
    assert len(content) <= MAX_BYTES

    async def test(decode: Decode) -> None:
        assert np.array_equal(await decode(content, framing), read_square(content, framing))

    decoding(test, _FAST)


def test_a_decoder_that_is_killed_is_replaced() -> None:
    async def test(decode: Decode) -> None:
        await decode(picture())
        parent, *children = decoders()
        assert parent.cmdline()[1:3] == ["-m", "fedkace_flwr.inference.decoding"] and children
        for child in children:
            child.kill()
        assert (await decode(picture())).shape == (3, 16, 16)

    decoding(test)


def test_the_parent_of_the_decoders_is_replaced() -> None:
    async def test(decode: Decode) -> None:
        await decode(picture())
        for process in decoders():
            process.kill()
        with pytest.raises(DecoderError, match="had to be started anew"):
            await decode(picture())
        assert (await decode(picture())).shape == (3, 16, 16)

    decoding(test)


@pytest.mark.slow
def test_decoders_load_nothing_that_they_do_not_need() -> None:
    code = "import sys, fedkace_flwr.inference.decoding; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert not {"torch", "flwr", "starlette", "uvicorn", "asyncio"} & set(done.stdout.split())


def test_no_process_is_left_behind() -> None:
    before = set(decoders())

    async def test(decode: Decode) -> None:
        await decode(picture())
        await decode(bombs.blank(1100, 1100, "PNG"))

    decoding(test)
    left = set(decoders()) - before
    psutil.wait_procs(left, timeout=60)  # the last one may still be ending
    assert not [process for process in left if process.is_running()]


def test_decoders_ignore_the_signals_that_end_the_service() -> None:
    """systemd and a terminal send them to all processes; requests in progress still need the decoders."""

    async def test(decode: Decode) -> None:
        await decode(picture())
        before = decoders()
        for process in before:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
        assert (await decode(picture())).shape == (3, 16, 16)
        assert set(before) <= set(decoders())

    decoding(test)


def test_decoders_do_not_get_the_key_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(encryption.VARIABLE, "c2VjcmV0")

    async def test(decode: Decode) -> None:
        await decode(picture())
        assert all(encryption.VARIABLE not in process.environ() for process in decoders())

    decoding(test)


def test_decoders_have_no_open_files_but_their_own() -> None:
    async def test(decode: Decode) -> None:
        await decode(picture())
        with Path(os.devnull).open("rb") as file:
            os.set_inheritable(file.fileno(), True)
            await decode(bombs.blank(1100, 1100, "PNG"))
        for process in decoders():
            assert process.num_fds() <= 5, process.open_files()

    decoding(test)


def test_a_lane_that_is_full_refuses_more_and_leaves_the_others_alone() -> None:
    lanes = (LANES[0], LANES[1], replace(LANES[2], places=2))
    large = bombs.blank(1700, 1600, "PNG")

    async def test(decode: Decode) -> None:
        found = await asyncio.gather(*(decode(large) for _ in range(5)), return_exceptions=True)
        assert sum(isinstance(each, np.ndarray) for each in found) >= 2
        refused = [each for each in found if isinstance(each, BaseException)]
        assert refused and all(isinstance(each, BusyError) for each in refused)
        assert (await decode(picture())).shape == (3, 16, 16)

    decoding(test, lanes)


def test_full_lanes_leave_connections_for_others() -> None:
    assert sum(lane.places for lane in LANES) < server._FEWEST < Limits().connections


def test_nobody_is_decoded_for_who_has_gone() -> None:
    async def run() -> None:
        service, bodies = Decoders(), Bodies()
        bomb, good = bombs.chunks(990_000), picture()

        async def decode(content: bytes) -> Pixels:
            async with bodies.upload() as upload:
                await bodies.make_room(len(content))
                upload.blocks, upload.size = [bytearray(content)], len(content)
                return await service.square(upload, "", FRAMING)

        gone = [asyncio.create_task(decode(bomb)) for _ in range(LANES[0].places - 1)]
        await asyncio.sleep(0)
        last = asyncio.create_task(decode(good))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        assert (await last).shape == (3, 16, 16)
        async with bodies.upload():
            await bodies.make_room(MEMORY)
        await service.close()

    asyncio.run(run())
