"""Who may read the page, and what those who may not get to see."""

import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: make venv")

from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from dynamix.cli.dashboard import token_of
from dynamix.cli.dashboard.server import COOKIE, HEADERS, SESSION_S, Gate

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


def test_loopback_needs_no_token_and_everything_else_gets_a_new_one() -> None:
    assert token_of("127.0.0.1", None) == token_of("localhost", None) == ""
    found = {token_of(host, None) for host in ("0.0.0.0", "::", "10.0.0.7", "0.0.0.0")}
    assert len(found) == 4
    assert min(map(len, found)) == 32


def test_a_token_is_read_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert token_of("127.0.0.1", str(file)) == TOKEN
    with pytest.raises(OSError, match="not a regular file"):
        token_of("127.0.0.1", "/dev/zero")


@pytest.mark.parametrize("text", ["", "fifteen-letters", "not printable \x00 and long", "ümlaut-umlaut-umlaut"])
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ValueError, match="at least 16 printable ASCII characters"):
        token_of("0.0.0.0", str(file))
