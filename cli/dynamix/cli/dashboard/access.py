"""Access to the page: without a token from this machine only, otherwise with the token; else 401 or 403.

A token comes as `Authorization: Bearer TOKEN`, or once as `?token=TOKEN`, which is exchanged for a cookie so that it
does not stay in the browser's history. The cookie is random; this process knows for how long it is good. Tokens and
cookies are compared by their digests, so that the time tells nothing of them.

Without a token the `Host` of a request must be this machine's: a page of another site, whose name was made to point
here (DNS rebinding), would have its own name there.
"""

import hashlib
import hmac
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamix.runtime.settings import is_loopback

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
    """ASGI middleware in front of everything that the server has."""

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
