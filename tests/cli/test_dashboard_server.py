"""The page's server on a real broker: events, JSON, captures, refusals, a broker that restarts."""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send
from tests.support import examples
from tests.support.examples import reward

from dynamix.cli.commands.dashboard import token_of
from dynamix.cli.dashboard.server import COOKIE, HEADERS, SESSION_S, DashboardServer, Gate
from dynamix.cli.documents import CapturedJob
from dynamix.cli.fleet import Fleet
from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import EmbeddedServer

DEMO = Path(__file__).parents[1] / "data" / "demo.dxc"
PAGE = Path(__file__).parents[2] / "cli" / "dynamix" / "cli" / "dashboard" / "page"
LOCAL: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "token": ""}


class Reply(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(server: DashboardServer, path: str, method: str = "GET") -> Reply:
    """One request, read to its end."""
    reader, writer = await _sent(server, path, method)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Reply(status=int(status.split()[1]), headers=headers, body=body)


async def events(server: DashboardServer, job: str) -> AsyncIterator[tuple[str, Any]]:
    """The events of a job's stream, as they come."""
    reader, writer = await _sent(server, f"/api/events?job={job}", "GET")
    kind = ""
    try:
        async for line in reader:
            if line.startswith(b"event: "):
                kind = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield kind, json.loads(line[6:])
    finally:
        writer.close()


async def _sent(server: DashboardServer, path: str, method: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = server.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()
    return reader, writer


class Page(msgspec.Struct):
    """What runs in a test of the live page."""

    broker: EmbeddedServer
    bus: Bus
    fleet: Fleet
    server: DashboardServer


@pytest.fixture
async def page(server: EmbeddedServer, bus: Bus) -> AsyncIterator[Page]:
    fleet = Fleet(bus)
    async with fleet.following(), DashboardServer(**LOCAL, fleet=fleet) as served:
        yield Page(server, bus, fleet, served)


async def first(stream: AsyncIterator[tuple[str, Any]], kind: str, holds: Any = lambda _: True) -> Any:
    """The first event of a kind of which something holds."""
    async with asyncio.timeout(30):
        async for found, data in stream:
            if found == kind and holds(data):
                return data
    raise AssertionError("the events ended")


async def publish_windows(bus: Bus, *windows: int, job: str = examples.JOB) -> None:
    for window in windows:
        for node, ranks in (("node-a", (0, 1)), ("node-b", (2, 3))):
            await bus.publish(examples.window(node, ranks, window, job=job))
            await bus.publish(reward(node, ranks, window, job=job))


async def followed(fleet: Fleet, windows: int) -> None:
    """Wait until the page's server heard all of the example job: so many windows and a decision."""
    async with asyncio.timeout(60):
        while True:
            news = fleet.news
            if (view := fleet.jobs.get(examples.JOB)) is not None and view.job is not None:
                nodes = [node for window in view.history for node in window.nodes.values()]
                whole = len(nodes) == 2 * windows and all(
                    node.stored_ns.keys() >= {"window", "reward"} for node in nodes
                )
                if whole and any(window.action for window in view.history):
                    return
            await news.wait()


async def test_a_reader_gets_what_was_stored_before_and_then_only_what_changed(page: Page) -> None:
    await page.bus.publish(examples.job())
    await publish_windows(page.bus, 0, 1)
    await page.bus.publish(examples.action(1))
    await followed(page.fleet, 2)
    stream = events(page.server, examples.JOB)
    overview = await first(stream, "overview", lambda data: data["jobs"])
    assert [(job["name"], job["phase"]) for job in overview["jobs"]] == [(examples.JOB, "running")]
    assert overview["services_missing"] == ["collector", "reward", "arbitrator"]
    whole = await first(stream, "job")
    assert (whole["is_whole"], whole["job"]["num_ranks"]) == (True, 4)
    assert [window["action"] is not None for window in whole["windows"]] == [False, True]
    await publish_windows(page.bus, 2)
    changed = await first(stream, "job", lambda data: [point["window"] for point in data["windows"]] == [2])
    assert changed["is_whole"] is False
    await stream.aclose()  # type: ignore[attr-defined]


async def test_what_comes_while_an_event_is_sent_is_in_the_next_one(page: Page) -> None:
    await page.bus.publish(examples.job())
    await publish_windows(page.bus, 0, 1)
    await page.bus.publish(examples.action(1))
    await followed(page.fleet, 2)
    sent: list[Any] = []
    done = asyncio.Event()

    async def send(message: Any) -> None:
        kind, _, data = message.get("body", b"").partition(b"\ndata: ")
        if kind == b"event: job":
            sent.append(json.loads(data))
            if len(sent) == 1:  # a slow reader
                await publish_windows(page.bus, 2)
                await followed(page.fleet, 3)
            else:
                done.set()

    async def receive() -> Any:
        await done.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": "/api/events", "query_string": f"job={examples.JOB}".encode()}
    headers = [(b"host", f"127.0.0.1:{page.server.port}".encode())]
    async with asyncio.timeout(30):
        await page.server.application({**scope, "headers": headers, "client": ("127.0.0.1", 1)}, receive, send)
    assert [[point["window"] for point in event["windows"]] for event in sent] == [[0, 1], [2]]


async def test_a_reader_beyond_the_limit_is_refused_until_one_leaves(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.cli.dashboard.server.MAX_READERS", 2)
    readers = [events(page.server, examples.JOB) for _ in range(2)]
    for one in readers:
        await first(one, "overview")
    refused = await ask(page.server, "/api/events")
    assert (refused.status, int(refused.headers["retry-after"]) > 0) == (503, True)
    assert (await ask(page.server, "/api/source")).status == 200
    await readers[0].aclose()  # type: ignore[attr-defined]
    status = b""
    async with asyncio.timeout(30):
        while b" 200 " not in status:
            reader, writer = await _sent(page.server, "/api/events", "GET")
            status = await reader.readline()
            writer.close()


async def test_the_page_survives_a_broker_that_restarts_and_says_so(page: Page) -> None:
    await page.bus.publish(examples.job())
    await publish_windows(page.bus, 0)
    stream = events(page.server, examples.JOB)
    await first(stream, "overview", lambda data: data["broker_connected"])
    await page.broker.kill()
    await first(stream, "overview", lambda data: not data["broker_connected"])
    await page.broker.restart()
    await first(stream, "overview", lambda data: data["broker_connected"])
    await publish_windows(page.bus, 1)
    found = await first(stream, "job", lambda data: data["job"]["window"] == 1)
    assert found["job"]["phase"] == "running"
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_job_that_ended_long_ago_is_read_when_it_is_asked_for(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamix.cli.fleet.RECENT_MESSAGES", 1)
    old = "old-00000001"
    await page.bus.publish(msgspec.structs.replace(examples.job(), job=old, phase="ended", end_reason="completed"))
    await publish_windows(page.bus, 0, 1, 2, job=old)
    await page.bus.publish(examples.job())
    await publish_windows(page.bus, 0)
    fleet = Fleet(page.bus)
    async with fleet.following(), DashboardServer(**LOCAL, fleet=fleet) as server, asyncio.timeout(30):
        while list(fleet.jobs) != [old, examples.JOB] or fleet.jobs[examples.JOB].window < 0:
            await fleet.news.wait()
        assert fleet.jobs[old].window == -1
        found = (await ask(server, f"/api/jobs/{old}")).json
    assert (found["job"]["phase"], len(found["windows"])) == ("ended", 3)


async def test_jobs_beyond_the_newest_are_counted_and_forgotten(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix.cli.fleet.MAX_JOBS", 2)
    for number in range(4):
        await page.bus.publish(msgspec.structs.replace(examples.job(), job=f"job-{number:08x}"))
    async with asyncio.timeout(30):
        while list(page.fleet.jobs) != ["job-00000002", "job-00000003"]:
            await page.fleet.news.wait()
    assert len(page.fleet.forgotten) == 2
    assert (await ask(page.server, "/api/jobs/job-00000000")).status == 404


async def test_two_captures_are_served_at_any_moment() -> None:
    captured = CapturedJob(DEMO)
    async with DashboardServer(**LOCAL, captures=[captured, captured]) as server:
        source = (await ask(server, "/api/source")).json
        assert (source["kind"], len(source["captures"])) == ("captures", 2)
        whole = (await ask(server, "/api/captures/1?windows=1")).json
        assert len(whole["windows"]) == 30
        half = (await ask(server, f"/api/captures/0?elapsed_s={captured.duration_s / 2}")).json
        assert "windows" not in half
        assert half["job"]["window"] < whole["job"]["window"]
        for path, status in (("2", 404), ("0?elapsed_s=x", 400), ("0?elapsed_s=-5", 200), ("0?elapsed_s=nan", 200)):
            assert (await ask(server, f"/api/captures/{path}")).status == status
        assert (await ask(server, "/api/events")).status == 404


async def test_every_file_of_the_page_is_served_and_none_other() -> None:
    async with DashboardServer(**LOCAL, captures=[]) as server:
        index = await ask(server, "/")
        assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "server" not in index.headers
        for path in (file for file in PAGE.rglob("*") if file.is_file()):
            found = await ask(server, f"/page/{path.relative_to(PAGE).as_posix()}")
            assert (found.status, len(found.body)) == (200, path.stat().st_size)
        for path in ("/page/../server.py", "/page/%2e%2e/server.py", "/page/", "/etc/passwd", "/api"):
            assert (await ask(server, path)).status == 404
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await ask(server, "/", method)).status == 405


def announced(*arguments: str) -> str:
    """What the command says before it is told to end, after which it says nothing."""
    command = [sys.executable, "-m", "dynamix.cli.main", "dashboard", str(DEMO), "--port", "0", "--host", "0.0.0.0"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        said = process.stderr.readline()
        process.terminate()
        rest = process.stderr.read()
    assert said.startswith("http://0.0.0.0:")
    assert (process.returncode, rest) == (0, "")
    return said


def test_the_command_prints_its_url_with_a_token_unless_that_is_from_a_file(tmp_path: Path) -> None:
    assert re.search(r"/\?token=[\w-]{20,} shows the page", announced())
    file = tmp_path / "token"
    file.write_text("a-token-of-24-characters\n")
    said = announced("--token-file", str(file))
    assert "a-token-of" not in said
    assert said.endswith(f"/?token= and what {file} holds); Ctrl-C ends it\n")


# --- who may read the page ---

TOKEN = "a-token-of-24-characters"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("the page")(scope, receive, send)


async def answer(
    token: str, path: str = "/", host: str = "127.0.0.1:8650", gate: Gate | None = None, **headers: str
) -> tuple[int, str, dict]:
    """Status, text and headers of what a GET gets."""
    path, _, query = path.partition("?")
    given = {"host": host, **headers}
    scope: Scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
    }
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    await (gate or Gate(application, token))(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode(), found


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        *((path, {}) for path in ("/", "/api/events?job=a", "/none", "/?token=")),
        ("/", {"authorization": f"Bearer {TOKEN[:-1]}"}),
        ("/", {"authorization": f"Basic {TOKEN}"}),
        ("/", {"authorization": "Bearer \xff\xfe"}),
        ("/", {"cookie": f"{COOKIE}={TOKEN}"}),
        ("/", {"cookie": "=;;=\xff"}),
    ],
)
async def test_without_the_token_every_path_is_401_under_any_host(path: str, headers: dict[str, str]) -> None:
    status, _, found = await answer(TOKEN, path, host="10.0.0.7:8650", **headers)
    assert (status, found["www-authenticate"]) == (401, "Bearer")
    assert "set-cookie" not in found
    assert (await answer(TOKEN, host="10.0.0.7", authorization=f"Bearer {TOKEN}"))[:2] == (200, "the page")


async def test_the_token_in_the_url_becomes_a_session_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(application, TOKEN)
    cookies = []
    for _ in range(2):
        status, _, headers = await answer(TOKEN, f"/?token={TOKEN}", gate=gate)
        assert (status, headers["location"]) == (303, "/")
        parts = {part.strip() for part in headers["set-cookie"].split(";")}
        assert {"HttpOnly", "SameSite=strict", f"Max-Age={SESSION_S}"} <= parts
        cookies.append(headers["set-cookie"].partition(";")[0])
        assert TOKEN not in cookies[-1]
    assert cookies[0] != cookies[1]
    assert [(await answer(TOKEN, gate=gate, cookie=one))[0] for one in cookies] == [200, 200]
    assert (await answer(TOKEN, cookie=cookies[0]))[0] == 401, "another process knows no session of this one"
    now_s = time.monotonic()
    monkeypatch.setattr("dynamix.cli.dashboard.server.time.monotonic", lambda: now_s + SESSION_S + 1)
    assert (await answer(TOKEN, gate=gate, cookie=cookies[0]))[0] == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8650", 200),
        ("localhost", 200),
        ("[::1]:8650", 200),
        ("127.0.0.1.evil.example:8650", 403),
        ("10.0.0.7:8650", 403),
        ("", 403),
    ],
)
async def test_without_a_token_only_this_machines_own_names_are_served(host: str, status: int) -> None:
    """Another site whose name was made to point here has that name in its requests."""
    assert (await answer("", host=host))[0] == status


async def test_every_answer_forbids_what_is_not_from_this_server() -> None:
    for token in ("", TOKEN):
        _, _, headers = await answer(token)
        assert {name.lower() for name in HEADERS} <= set(headers)
        assert headers["content-security-policy"].startswith("default-src 'none'")


def test_beyond_loopback_a_token_is_needed_from_the_file_or_a_new_one(tmp_path: Path) -> None:
    assert token_of("127.0.0.1", None) == token_of("localhost", None) == ""
    found = {token_of(host, None) for host in ("0.0.0.0", "::", "10.0.0.7", "0.0.0.0")}
    assert (len(found), min(map(len, found))) == (4, 32)
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert token_of("127.0.0.1", str(tmp_path / "token")) == TOKEN
    with pytest.raises(OSError, match="not a regular file"):
        token_of("127.0.0.1", "/dev/zero")


@pytest.mark.parametrize("text", ["", "fifteen-letters", "not printable \x00 and long", "ümlaut-umlaut-umlaut"])
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ValueError, match="at least 16 printable ASCII characters"):
        token_of("0.0.0.0", str(file))
