"""The memory of all bodies together: who gives way when it is full."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from fedkace_flwr.inference.bodies import MAX_BYTES, Bodies, Pace, Upload

LONG = Pace(seconds=600, window=600)


class Caller:
    """A request whose body arrives as the test says."""

    def __init__(self, bodies: Bodies, stated: int) -> None:
        self._blocks: asyncio.Queue[bytes] = asyncio.Queue()
        self._left = stated
        head = {"type": "http", "headers": [(b"content-length", b"%d" % stated)]}
        self._request = Request(head, self._next)
        self.finish = asyncio.Event()
        self.upload: Upload | None = None
        self.task = asyncio.create_task(self._read(bodies))

    async def send(self, size: int) -> None:
        """Send some bytes, and wait until they were taken or never will be."""
        self._blocks.put_nowait(bytes(size))
        for _ in range(20):
            await asyncio.sleep(0)

    async def _next(self) -> dict[str, object]:
        block = await self._blocks.get()
        self._left -= len(block)
        return {"type": "http.request", "body": block, "more_body": self._left > 0}

    async def _read(self, bodies: Bodies) -> int:
        async with bodies.upload() as self.upload:
            await self.upload.read(self._request)
            with self.upload.needed():
                await self.finish.wait()
            return self.upload.size


def running(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@running
async def test_the_largest_unfinished_body_gives_way() -> None:
    bodies = Bodies(memory=100, pace=LONG)
    large, small, late = (Caller(bodies, size) for size in (90, 40, 40))
    await large.send(60)
    await small.send(30)
    await late.send(40)  # does not fit
    with pytest.raises(HTTPException) as caught:
        await large.task
    assert caught.value.status_code == 503 and caught.value.headers == {"Retry-After": "1"}
    await small.send(10)
    for caller in (small, late):
        assert not caller.task.done()
        caller.finish.set()
        assert await caller.task == 40


@running
async def test_a_body_that_is_being_decoded_is_waited_for() -> None:
    bodies = Bodies(memory=100, pace=LONG)
    decoded, waiting = Caller(bodies, 80), Caller(bodies, 50)
    await decoded.send(80)
    await waiting.send(50)
    assert not waiting.task.done() and waiting.upload is not None and not waiting.upload.size
    decoded.finish.set()
    assert await decoded.task == 80
    waiting.finish.set()
    assert await waiting.task == 50


@running
async def test_a_body_that_is_the_largest_itself_gives_way() -> None:
    bodies = Bodies(memory=100, pace=LONG)
    small, greedy = Caller(bodies, 40), Caller(bodies, 90)
    await small.send(20)
    await greedy.send(50)
    await greedy.send(40)
    with pytest.raises(HTTPException, match="too many large requests"):
        await greedy.task
    await small.send(20)
    small.finish.set()
    assert await small.task == 40


@running
async def test_memory_is_free_again_whatever_happens() -> None:
    bodies = Bodies(memory=100, pace=LONG)
    for end in ("finished", "abandoned", "given up", "cancelled"):
        caller = Caller(bodies, 100)
        await caller.send(90)
        if end == "finished":
            await caller.send(10)
            caller.finish.set()
        elif end == "cancelled":
            caller.task.cancel()
        else:
            assert caller.upload is not None
            caller.upload.abandon() if end == "abandoned" else caller.upload.give_up(HTTPException(503))
        await asyncio.gather(caller.task, return_exceptions=True)
        async with bodies.upload():
            await asyncio.wait_for(bodies.make_room(100), 60)
            bodies.free(100)


@running
async def test_a_caller_who_hangs_up_is_not_worked_for() -> None:
    caller = Caller(Bodies(pace=LONG), 100)
    await caller.send(100)
    assert caller.upload is not None and caller.upload.size == 100
    caller.upload.abandon()
    with pytest.raises(HTTPException, match="the connection was closed"):
        await caller.task
    assert caller.upload.size == 0


@running
async def test_bodies_that_arrive_byte_by_byte_take_no_more_memory() -> None:
    caller = Caller(Bodies(pace=LONG), 3000)
    for _ in range(3000):
        caller._blocks.put_nowait(b"x")
    while caller.upload is None or caller.upload.size < 3000:
        await asyncio.sleep(0)
    assert len(caller.upload.blocks) == 1
    caller.finish.set()
    assert await caller.task == 3000


@running
async def test_what_is_stated_is_believed_before_anything_is_read() -> None:
    for stated, status in ((0, 422), (MAX_BYTES + 1, 413), (2**70, 413)):
        with pytest.raises(HTTPException) as caught:
            await Caller(Bodies(pace=LONG), stated).task
        assert caught.value.status_code == status
