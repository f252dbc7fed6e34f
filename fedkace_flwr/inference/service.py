"""A small HTTP service on the machine of one client: ``POST /predict``, ``GET /model``, ``GET /health``.

A new model is loaded while the present one still answers, and then replaces it; each request is answered by a single
model. There is no authentication.
"""

import asyncio
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedkace_flwr.data.images import MAX_PIXELS, read_square
from fedkace_flwr.errors import DataError, StateError
from fedkace_flwr.inference.kept_models import Predictor, listing, load_newest

logger = logging.getLogger(__name__)

MAX_BYTES = 10_000_000
"""Maximum size of a request's body."""

_DRAINED = 10 * MAX_BYTES  # of a body that is too large: read and discarded, so that the sender gets the answer
_BODY_SECONDS = 30.0
_AT_A_TIME = 16  # requests whose bodies are in memory; others wait unread
_WORKERS = 2  # pictures decoded at the same time, up to 150 MB each
_POLL_SECONDS = 0.5
_LAST_REQUESTS_SECONDS = 20
_DEFAULT_TOP = 3


class Watched:
    """The newest model of a folder, reloaded when a new generation appears.

    Attributes
    ----------
    predictor : Predictor or None
        The present model; None before the first one exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.predictor: Predictor | None = None
        self._known: object = None

    def look(self) -> None:
        """Load the newest generation if the folder has changed; keep the present model if that fails."""
        found = listing(self.folder)
        if found == self._known:
            return
        self._known = found
        if not found:
            return
        try:
            self.predictor = load_newest(self.folder)
        except StateError as error:
            logger.warning("%s; keeping the present model", error)
        else:
            kept = self.predictor.kept
            logger.info("now predicting with the %s model of round %d", kept.answering, kept.round)

    async def follow(self) -> None:
        """Check the folder at regular intervals."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # the present model keeps answering, whatever went wrong
                logger.exception("%s could not be read", self.folder)
            await asyncio.sleep(_POLL_SECONDS)


def application(watched: Watched) -> Starlette:
    """Create the service for a folder that is being watched."""
    slots, workers = asyncio.Semaphore(_AT_A_TIME), ThreadPoolExecutor(_WORKERS, thread_name_prefix="predict")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(watched.follow())
        yield
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        workers.shutdown()

    async def predict(request: Request) -> Response:
        top = _top(request)
        async with slots:
            picture = await _picture(request)
            predictor = _answering(watched)
            work = partial(_answered, predictor, picture, top)
            return JSONResponse(await asyncio.get_running_loop().run_in_executor(workers, work))

    async def model(request: Request) -> Response:
        return JSONResponse(_answering(watched).kept.described())

    async def health(request: Request) -> Response:
        ready = watched.predictor
        return JSONResponse({"status": "ok", "round": ready.kept.round if ready else None})

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/model", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refused, Exception: _broken}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def serve(folder: Path, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT, finish the current requests, and return the exit status.

    Raises
    ------
    OSError
        The address is not available.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: cannot listen there ({error.strerror or error})") from error
    watched = Watched(folder)
    watched.look()
    config = uvicorn.Config(
        application(watched),
        http="h11",  # limits the size of headers
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_REQUESTS_SECONDS,
    )
    server = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again when it ends; this absorbs it
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    bound = listener.getsockname()
    if not ipaddress.ip_address(bound[0].partition("%")[0]).is_loopback:
        logger.warning("%s is reachable from other machines without authentication; use a reverse proxy", bound[0])
    shown = f"[{bound[0]}]" if family == socket.AF_INET6 else bound[0]
    print(f"serving {folder} at http://{shown}:{bound[1]}", flush=True)
    server.run(sockets=[listener])
    return 0


def _answering(watched: Watched) -> Predictor:
    predictor = watched.predictor
    if predictor is None:
        raise HTTPException(503, f"there is no model yet in {watched.folder}", {"Retry-After": "10"})
    return predictor


def _answered(predictor: Predictor, picture: bytes, top: int) -> dict[str, Any]:
    try:
        square = read_square(picture, predictor.kept.framing, MAX_PIXELS)
    except DataError as error:
        raise HTTPException(422, f"the picture cannot be used: {error}") from error
    return predictor.answer(square, top)


def _top(request: Request) -> int:
    text = request.query_params.get("top", str(_DEFAULT_TOP))
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 6 and int(text) >= 1):
        raise HTTPException(422, f"top = {text[:20]!r}: must be a whole number from 1 to 999999")
    return int(text)


async def _picture(request: Request) -> bytes:
    """The picture's bytes: the body, or the one file of a form."""
    body = await _body(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return await _uploaded(request, body) if kind == "multipart/form-data" else body


async def _body(request: Request) -> bytes:
    stated = request.headers.get("content-length", "0")
    size = int(stated) if stated.isdecimal() else 0
    if size > _DRAINED or (size > MAX_BYTES and request.headers.get("expect", "").lower() == "100-continue"):
        raise _too_large()
    body, read = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for block in request.stream():
                read += len(block)
                if read <= MAX_BYTES:
                    body += block
                elif read > _DRAINED:
                    break
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {_BODY_SECONDS:g} seconds") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the body ended early") from error
    if read > MAX_BYTES:
        raise _too_large()
    if not body:
        raise HTTPException(422, "the body is empty; send the bytes of a picture")
    return bytes(body)


def _too_large() -> HTTPException:
    message = f"the body is too large: at most {MAX_BYTES:,} bytes are allowed"
    return HTTPException(413, message, {"Connection": "close"})


async def _uploaded(request: Request, body: bytes) -> bytes:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(request.headers, stream(), max_files=1, max_fields=10).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        reason = getattr(error, "message", None) or "it cannot be read"
        raise HTTPException(422, f"the form is malformed: {' '.join(str(reason).split())}") from error
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not files:
        raise HTTPException(422, "the form holds no file; send one, with a file name")
    try:
        return await files[0].read()
    finally:
        await form.close()


async def _refused(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the service failed; its log says why"}, 500)
