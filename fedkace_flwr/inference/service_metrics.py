"""What the prediction service has answered, as metrics for Prometheus: ``GET /metrics``."""

import time
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from fedkace_flwr.inference.service import Watched

_OTHER = "other"  # paths that the service lacks, of which callers may think of any number


class ServiceMetrics:
    """Counts the requests of one service.

    Parameters
    ----------
    watched : Watched
        The folder with the service's models.
    paths : sequence of str
        The paths that it has.
    """

    def __init__(self, watched: "Watched", paths: tuple[str, ...]) -> None:
        self._paths = frozenset(paths)
        self._registry = own = CollectorRegistry()
        meaning = "Requests, those that were refused included."
        self._requests = Counter("fedkace_predict_requests", meaning, ["path", "status"], registry=own)
        meaning = "Seconds to the end of an answer."
        self._seconds = Histogram("fedkace_predict_request_seconds", meaning, ["path"], registry=own)
        model = Gauge("fedkace_predict_model_round", "Round of the model that answers; 0: none does.", registry=own)
        model.set_function(lambda: watched.predictor.kept.round if watched.predictor else 0)
        failing = Gauge("fedkace_predict_failing", "Whether predictions fail, as GET /health says.", registry=own)
        failing.set_function(lambda: watched.failing)

    async def answer(self, request: Request) -> Response:
        """Answer with the metrics."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return an application that counts the requests to another (a middleware)."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            begun, status = time.perf_counter(), 500

            async def noted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            path = scope["path"] if scope["path"] in self._paths else _OTHER
            try:
                await app(scope, receive, noted)
            finally:
                self._requests.labels(path, status).inc()
                self._seconds.labels(path).observe(time.perf_counter() - begun)

        return counted
