"""A small HTTP service on the machine of one client: ``POST /predict``, ``GET /model``, ``GET /health``, ``GET /metrics``.

A new model is loaded while the present one still answers, and then replaces it; each request is answered by a single
model. Bodies are bounded before they are read, and pictures are decoded one after the other in another process
(:mod:`fedkace_flwr.data.picture_process`). Who is answered is decided in :mod:`fedkace_flwr.inference.access`; how many
at once, and for how long, by uvicorn (:mod:`fedkace_flwr.inference.server`) and by nginx, if it stands in front
(``deploy/nginx-predict.conf``).
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fedkace_flwr.data.picture_process import Limits, PictureProcess
from fedkace_flwr.errors import DataError, FedkaceError, ModelError
from fedkace_flwr.inference.access import Access, refusal
from fedkace_flwr.inference.array_input import read_samples
from fedkace_flwr.inference.kept_models import Predictor
from fedkace_flwr.inference.model_files import listing, newest

logger = logging.getLogger(__name__)

MAX_BYTES = 10_000_000
"""Largest body of a request, in bytes."""

_AT_A_TIME = 2  # predictions
_POLL_SECONDS = 0.5
_DEFAULT_TOP = 3


class Watched:
    """The newest model of a folder, reloaded when a new generation appears.

    Attributes
    ----------
    predictor : Predictor or None
        The present model; None before the first one exists.
    fault : str
        Why the newest model cannot be used, or why the last prediction failed; empty if there is no such reason.
    failing : bool
        Whether there are no predictions: the last one failed, or there is no model that can be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.predictor: Predictor | None = None
        self.fault = ""
        self.failing = False
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
            self.predictor, self.fault = newest(self.folder)
        except FedkaceError as error:
            self.fault, self.failing = str(error), self.failing or self.predictor is None
            logger.warning("%s; keeping the present model", error)
        else:
            kept, self.failing = self.predictor.kept, False
            logger.info("now predicting with the %s model of round %d", kept.answering, kept.round)

    async def follow(self) -> None:
        """Check the folder at regular intervals."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # the present model keeps answering, whatever went wrong
                logger.exception("%s could not be read", self.folder)
            await asyncio.sleep(_POLL_SECONDS)


def application(watched: Watched, access: Access | None = None, limits: Limits | None = None) -> Starlette:
    """Create the service for a folder that is being watched.

    Parameters
    ----------
    watched : Watched
        The folder.
    access : Access, optional
        Who is answered.
    limits : Limits, optional
        What a picture may take.
    """
    decoder, decoding, predicting = PictureProcess(limits), asyncio.Lock(), asyncio.Semaphore(_AT_A_TIME)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with decoder:
            following = asyncio.create_task(watched.follow())
            yield
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    async def predict(request: Request) -> Response:
        top, content = _top(request), await _body(request)
        predictor = _answering(watched)
        async with decoding:
            if await request.is_disconnected():
                raise ClientDisconnect
            sample = await asyncio.to_thread(_sample, decoder, content, predictor)
        del content
        async with predicting:
            try:
                found = await asyncio.to_thread(predictor.answer, sample, top)
            except ModelError as error:
                watched.fault, watched.failing = f"the model of round {predictor.kept.round}: {error}", True
                raise HTTPException(500, watched.fault) from error
        watched.failing = False
        return JSONResponse(found)

    async def model(request: Request) -> Response:
        return JSONResponse(_answering(watched).kept.described())

    async def health(request: Request) -> Response:
        ready, fault = watched.predictor, watched.fault
        status = "failing" if watched.failing else "ok"
        told = {"status": status, "round": ready.kept.round if ready else None, **({"fault": fault} if fault else {})}
        return JSONResponse(told, 503 if watched.failing else 200)

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/model", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refused, ClientDisconnect: _gone, Exception: _broken}
    layers = [Middleware(_Guard, access or Access())]
    with suppress(ImportError):  # without prometheus-client there are no metrics
        from fedkace_flwr.inference.service_metrics import ServiceMetrics

        paths = (*(route.path for route in routes), "/metrics")
        metrics = ServiceMetrics(watched, paths)
        routes.append(Route("/metrics", metrics.answer, methods=["GET"]))
        layers.insert(0, Middleware(metrics.counting))
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=layers)


class _Guard:
    """Lets an application see only the requests that ``access`` admits."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = refusal(scope, self._access) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        status, reason = found
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        await JSONResponse({"error": reason}, status, headers)(scope, receive, send)


async def _body(request: Request) -> bytes:
    """A request's body, of a size that it states and that is checked before any of it is read."""
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise HTTPException(415, "forms are not supported; send the bytes of the picture alone")
    if "transfer-encoding" in request.headers:
        raise HTTPException(411, "a transfer encoding is not supported; state the content length")
    stated = int(request.headers.get("content-length", "0"))
    if stated > MAX_BYTES:
        raise HTTPException(413, f"the body is too large: at most {MAX_BYTES:,} bytes are allowed")
    if not stated:
        raise HTTPException(422, "the body is empty; send the bytes of a picture")
    return await request.body()


def _sample(decoder: PictureProcess, content: bytes, predictor: Predictor) -> NDArray[Any]:
    """What the networks take, from a picture or, of a model of arrays, from JSON or a .npz file."""
    kept = predictor.kept
    try:
        if kept.framing:
            return decoder.square(content, kept.framing)
        samples = read_samples(kept.shape, content)
        if len(samples) != 1:
            raise DataError(f"it holds {len(samples)} samples; must be one")
        return np.asarray(samples[0])
    except DataError as error:
        what = "picture" if kept.framing else "array"
        raise HTTPException(422, f"the {what} cannot be used: {error}") from error
    except OSError as error:
        logger.exception("no picture can be decoded")
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from error


def _answering(watched: Watched) -> Predictor:
    predictor = watched.predictor
    if predictor is None:
        raise HTTPException(503, f"there is no model yet in {watched.folder}", {"Retry-After": "10"})
    return predictor


def _top(request: Request) -> int:
    text = request.query_params.get("top", str(_DEFAULT_TOP))
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 6 and int(text) >= 1):
        raise HTTPException(422, f"top = {text[:20]!r}: must be a whole number from 1 to 999999")
    return int(text)


async def _refused(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return JSONResponse({"error": "the body ended early"}, 400)


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the service failed; its log says why"}, 500)
