"""The web server: the page, its data as JSON and as server-sent events, on one address, until it is told to stop.

/                              the page
/api/source                    what it shows: a bus, or captures with their durations
/api/events?job=JOB            events `overview` (all jobs, services, alarms) and `job` (one job)
/api/jobs/JOB                  one job with its windows
/api/captures/N?elapsed_s=S    a capture as it was S seconds after its first message; &windows=1 adds all its windows
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request, cookie_parser
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamix.cli.documents import MOST_RANKS, CapturedJob, alarms_of_job, job_document, overview, window_document
from dynamix.cli.fleet import Fleet
from dynamix.cli.output import Document
from dynamix.recording.job_view import JobView
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import is_loopback

PAGE = Path(__file__).parent / "page"
MIN_INTERVAL_S = 0.25
"""Events are no closer than this, however fast windows come."""
OVERVIEW_EVERY_S = 1.0
MAX_READERS = 256
"""Streams of events at once, each some 100 kB."""
STOP_TIMEOUT_S = 2


class DashboardServer:
    """`async with DashboardServer(...) as server: ...` answers on `server.url`. It needs the extra `cli`.

    Attributes:
        url: where a browser finds the page, with the token.
        port: the one that it listens on.
    """

    def __init__(
        self, *, host: str, port: int, token: str, fleet: Fleet | None = None, captures: Sequence[CapturedJob] = ()
    ) -> None:
        """Show a bus by its `fleet`, which the caller keeps up to date, or else `captures`.

        Raises:
            OSError: when it cannot listen on this address.
        """
        self._fleet = fleet
        self._captures = captures
        self._stopping = asyncio.Event()
        self._num_readers = 0
        self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        where = f"[{host}]" if ":" in host else host
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{where}:{self.port}/" + (f"?token={token}" if token else "")
        of_captures = [
            {"file": one.path.name, "job": one.job, "duration_s": one.duration_s, "start_unix_s": one.start_ns / 1e9}
            for one in captures
        ]
        source = {"kind": "captures" if fleet is None else "bus", "captures": of_captures}
        routes = [
            Route("/", lambda _: FileResponse(PAGE / "index.html")),
            Mount("/page", StaticFiles(directory=PAGE)),
            Route("/api/source", lambda _: _json(source)),
            Route("/api/events", self._events),
            Route("/api/jobs/{name}", self._job),
            Route("/api/captures/{number:int}", self._capture),
        ]
        self.application = Gate(Starlette(routes=routes), token)

    async def __aenter__(self) -> Self:
        config = uvicorn.Config(
            self.application,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        self._server = _QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="dashboard")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        self._socket.close()

    async def _job(self, request: Request) -> Response:
        view = None if self._fleet is None else await self._fleet.open(request.path_params["name"])
        return PlainTextResponse("404: there is no such job\n", 404) if view is None else _json(_job_event(view, 0))

    async def _capture(self, request: Request) -> Response:
        number = request.path_params["number"]
        if number >= len(self._captures):
            return PlainTextResponse("404: there is no such capture\n", 404)
        captured = self._captures[number]
        try:
            elapsed_s = float(request.query_params.get("elapsed_s", captured.duration_s))
        except ValueError:
            return PlainTextResponse("400: elapsed_s is not a number\n", 400)
        elapsed_s = min(max(0.0, elapsed_s), captured.duration_s)
        with_windows = request.query_params.get("windows") == "1"
        return _json(await asyncio.to_thread(captured.document, elapsed_s, with_windows=with_windows))

    async def _events(self, request: Request) -> Response:
        if self._fleet is None:
            return PlainTextResponse("404: captures have no events\n", 404)
        if self._num_readers >= MAX_READERS:
            text = f"503: {MAX_READERS} readers have the page open already: close one, or try again later\n"
            return PlainTextResponse(text, 503, {"Retry-After": "10"})
        headers = {"X-Accel-Buffering": "no"}
        events = self._event_stream(self._fleet, request.query_params.get("job", ""))
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _event_stream(self, fleet: Fleet, name: str) -> AsyncIterator[bytes]:
        """Changes since the reader's last event, at most every `MIN_INTERVAL_S`; the overview each second."""
        overview_due_s, since = 0.0, 0
        self._num_readers += 1
        try:
            yield b"retry: 1000\n\n"
            while not self._stopping.is_set():
                news = fleet.news
                if (now_s := time.monotonic()) >= overview_due_s:
                    overview_due_s = now_s + OVERVIEW_EVERY_S
                    document = overview(fleet.jobs.values(), fleet.heartbeats, now_ns=time.time_ns(), now_s=now_s)
                    about = {"broker_connected": fleet.bus.is_connected, "num_older_jobs": len(fleet.forgotten)}
                    yield _event("overview", {**about, "now_unix_s": time.time(), **document})
                view = fleet.opened(name)  # without waiting: the page shows that the broker is away
                if view is not None and view.revision != since:
                    change, since = _event("job", _job_event(view, since)), view.revision
                    yield change
                await asyncio.sleep(MIN_INTERVAL_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OVERVIEW_EVERY_S - MIN_INTERVAL_S):
                        await news.wait()
        finally:  # the reader has gone, or we end
            self._num_readers -= 1


@contextlib.asynccontextmanager
async def served(bus: Bus, *, host: str, port: int, token: str) -> AsyncIterator[DashboardServer]:
    """Serve a bus for as long as the context lasts.

    Raises OSError when it cannot listen, and BusError, also in the midst, when the bus cannot be followed any more.
    """
    fleet = Fleet(bus)
    async with fleet.following(), DashboardServer(host=host, port=port, token=token, fleet=fleet) as server:
        yield server


def _job_event(view: JobView, since: int) -> Document:
    now_ns = time.time_ns()
    return {
        "is_whole": since == 0,
        "job": job_document(view, now_ns, most_ranks=MOST_RANKS),
        "windows": [window_document(one, most_ranks=MOST_RANKS) for one in view.history if one.revision > since],
        "alarms": list(alarms_of_job(view, now_ns)),
    }


def _event(kind: str, document: Document) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(document) + b"\n\n"


def _json(document: Document) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the command has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# --- access to the page

COOKIE = "dynamix-dashboard"
SESSION_S = 12 * 3600
"""Lifetime of a cookie, unless the server ends before."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: nothing is fetched from elsewhere, no other site shows or reads the page."""
NO_TOKEN = "401: a token is needed: open the URL that `dynamix dashboard` printed\n"  # noqa: S105 - a message
WRONG_HOST = "403: without a token the page is for this machine only: open it by 127.0.0.1 or localhost\n"


class Gate:
    """ASGI middleware: without a token for this machine only, otherwise with the token; else 401 or 403.

    A token comes as `Authorization: Bearer TOKEN`, or once as `?token=TOKEN`, which is exchanged for a cookie so that
    it does not stay in the browser's history. The cookie is random; this process knows for how long it is good. Tokens
    and cookies are compared by their digests, so that the time tells nothing of them.

    Without a token the `Host` of a request must be this machine's: a page of another site, whose name was made to point
    here (DNS rebinding), would have its own name there.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        """Admit readers with `token`; if it is empty, requests that name this machine as host."""
        self._app = app
        self._token = token
        self._sessions: dict[bytes, float] = {}
        """Expiry of each cookie by its digest, on the monotonic clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] != "http":
            return
        answer = self._refusal(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._token:
            host = headers.get("host", "").rpartition("]")
            name = f"{host[0]}]" if host[0] else host[2].partition(":")[0]
            return None if is_loopback(name) else PlainTextResponse(WRONG_HOST, 403)
        if self._is_known(headers):
            return None
        given = QueryParams(scope["query_string"]).get("token", "")
        if scope["method"] != "GET" or not self._matches(given):
            return PlainTextResponse(NO_TOKEN, 401, {"WWW-Authenticate": "Bearer"})
        now_s, cookie = time.monotonic(), secrets.token_urlsafe(32)
        self._sessions = {known: until_s for known, until_s in self._sessions.items() if until_s > now_s}
        self._sessions[_digest(cookie)] = now_s + SESSION_S
        response = RedirectResponse(scope["path"], 303)
        response.set_cookie(COOKIE, cookie, max_age=SESSION_S, httponly=True, samesite="strict", path="/")
        return response

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._matches(bearer.strip()):
            return True
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return self._sessions.get(_digest(cookie), 0.0) > time.monotonic()

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(_digest(given), _digest(self._token))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()
