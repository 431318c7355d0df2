"""Answers scrapes at a socket that listens already: GET /metrics, and /grafana.json, the dashboard."""

import hmac
import socket
import socketserver
import threading
import traceback
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

_AT_ONCE = 16  # connections; more are closed at once
_SILENT_SECONDS = 5.0  # a connection that says nothing is closed
_FAULTS_SHOWN = 100  # kinds, each once in the log
_DASHBOARD = "grafana.json"
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def app(collector: Collector, key: bytes | None) -> App:
    """What answers; with a `key` only those who send it as `Authorization: Bearer KEY`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    metrics = make_wsgi_app(registry)
    wanted = b"Bearer " + key if key else b""
    noted = set[str]()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        brought = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if wanted and not hmac.compare_digest(brought, wanted):
            return _text(start, "401 Unauthorized", b"send Authorization: Bearer KEY\n")
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            try:
                return metrics(environ, start)
            except Exception as error:
                if (fault := repr(error)[:200]) not in noted and len(noted) < _FAULTS_SHOWN:
                    noted.add(fault)
                    traceback.print_exception(error)
                said = f"{type(error).__name__}, see logs/prometheus.log of the run\n"
                return _text(start, "500 Internal Server Error", said.encode())
        if path == f"/{_DASHBOARD}":
            return _text(start, "200 OK", dashboard(), "application/json")
        return _text(start, "404 Not Found", f"there are /metrics and /{_DASHBOARD}\n".encode())

    return answer


def dashboard() -> bytes:
    return files("laminar_hpc.report.prometheus").joinpath(_DASHBOARD).read_bytes()


def _text(start: Callable[..., Any], status: str, body: bytes, kind: str = "text/plain") -> list[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, *_: object) -> None:
        """No line for each scrape."""


class ScrapeServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves `app` at `listener`, which it takes over, with few connections at a time."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: App) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(app)
        self._room = threading.BoundedSemaphore(_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, *_: object) -> None:
        """A client that goes away is nobody's trouble."""
