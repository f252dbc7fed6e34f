"""A small HTTP service on the machine of one client: ``POST /predict``, ``GET /model``, ``GET /health``.

A new model is loaded while the present one still answers, and then replaces it; each request is answered by a single
model. What callers may cost is limited: connections and their deadlines in :mod:`fedkace_flwr.inference.connections`,
bodies in :mod:`fedkace_flwr.inference.bodies`, pictures in :mod:`fedkace_flwr.inference.decoders`. Who is answered is
decided in :mod:`fedkace_flwr.inference.access`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedkace_flwr.errors import DataError, StateError
from fedkace_flwr.inference import forms
from fedkace_flwr.inference.access import Access, guarded
from fedkace_flwr.inference.bodies import Bodies, Upload
from fedkace_flwr.inference.connections import Application, connection_of, following
from fedkace_flwr.inference.decoders import LANES, DecoderError, Decoders, Lane
from fedkace_flwr.inference.kept_models import Predictor, listing, load_newest

logger = logging.getLogger(__name__)

_AT_A_TIME = 2  # predictions
_POLL_SECONDS = 0.5
_DEFAULT_TOP = 3


class Watched:
    """The newest model of a folder, reloaded when a new generation appears.

    Attributes
    ----------
    predictor : Predictor or None
        The present model; None before the first one exists.
    failed : int
        Predictions that have failed since the last one that did not; a first model that cannot be used counts as one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.predictor: Predictor | None = None
        self.failed = 0
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
            predictor = load_newest(self.folder)
        except StateError as error:
            logger.warning("%s; keeping the present model", error)
            self.failed += self.predictor is None
        else:
            self.predictor, self.failed, kept = predictor, 0, predictor.kept
            logger.info("now predicting with the %s model of round %d", kept.answering, kept.round)

    def answer(self, predictor: Predictor, square: NDArray[np.uint8], top: int) -> dict[str, Any]:
        """The model's answer, as :meth:`Predictor.answer` gives it; count whether it fails."""
        try:
            found = predictor.answer(square, top)
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                logger.warning("predictions fail: %s", error)
            raise
        self.failed = 0
        return found

    async def follow(self) -> None:
        """Check the folder at regular intervals."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # the present model keeps answering, whatever went wrong
                logger.exception("%s could not be read", self.folder)
            await asyncio.sleep(_POLL_SECONDS)


def application(
    watched: Watched, access: Access | None = None, bodies: Bodies | None = None, lanes: Sequence[Lane] = LANES
) -> Application:
    """Create the service for a folder that is being watched.

    Parameters
    ----------
    watched : Watched
        The folder.
    access : Access, optional
        Who is answered.
    bodies : Bodies, optional
        Limits of bodies.
    lanes : sequence of Lane
        Limits of pictures.
    """
    slots, workers = asyncio.Semaphore(_AT_A_TIME), ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="predict")
    decoders, admitted = Decoders(lanes), bodies or Bodies()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        decoders.start()
        following = asyncio.create_task(watched.follow())
        yield
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await decoders.close()
        workers.shutdown()

    async def predict(request: Request) -> Response:
        top = _top(request)
        async with admitted.upload() as upload:
            connection = connection_of(request.scope)
            if connection is not None:
                connection.on_lost = upload.abandon
            await upload.read(request)
            predictor = _answering(watched)
            square = await _square(decoders, upload, request, predictor)
            upload.release()
            async with slots:
                loop = asyncio.get_running_loop()
                return JSONResponse(await loop.run_in_executor(workers, watched.answer, predictor, square, top))

    async def model(request: Request) -> Response:
        return JSONResponse(_answering(watched).kept.described())

    async def health(request: Request) -> Response:
        ready, failed = watched.predictor, watched.failed
        said = {"status": "predictions fail" if failed else "ok", "round": ready.kept.round if ready else None}
        return JSONResponse({**said, "failed": failed} if failed else said, 503 if failed else 200)

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/model", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _refused, StateError: _unable, Exception: _broken}
    routed = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return following(guarded(routed, access or Access()))


async def _square(decoders: Decoders, upload: Upload, request: Request, predictor: Predictor) -> NDArray[np.uint8]:
    kind = request.headers.get("content-type", "")
    form = kind if kind.partition(";")[0].strip().lower() == forms.KIND else ""
    try:
        return await decoders.square(upload, form, predictor.kept.framing)
    except DataError as error:
        raise HTTPException(422, str(error)) from error
    except DecoderError as error:
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


async def _unable(request: Request, error: StateError) -> Response:
    return JSONResponse({"error": str(error)}, 500)


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the service failed; its log says why"}, 500)
