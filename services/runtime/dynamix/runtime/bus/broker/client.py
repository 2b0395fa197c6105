"""nats-py's client with a shorter way in: each message goes straight to its handler.

nats-py parses the headers of every message, builds an object for it, puts that in a queue and wakes a task that awaits
a callback: more than half of the cost of receiving a message. No reader here needs headers beyond the status line, and
no handler waits. The price is one overridden private method; `check_nats_py` sees that it is still what we override.
`parse_status` reads the status line that the broker sends in place of a payload.
"""

import asyncio
import contextlib
import inspect
import logging
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import ParseResult

import nats
import nats.aio.client
from nats.aio.transport import TcpTransport

from .errors import BusError

logger = logging.getLogger(__name__)

Handler = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Takes subject, reply subject, payload and raw headers of a message; must not block."""

CLOSE_TIMEOUT_S = 1.0
USER_AUTHENTICATION = "user authentication"
"""Followed by `expired` or `revoked`: how the broker ends the connections of such a key."""

NOT_FOUND = 404
REQUEST_EXPIRED = 408
NO_RESPONDERS = 503

_PREFIX = b"NATS/1.0 "
_PENDING = (b"nats-pending-messages", b"nats-num-pending")
"""Headers that say how many messages are left, of a request to a consumer and of one to a stream."""

_PARAMETERS = ["self", "sid", "subject", "reply", "data", "headers"]


class Client(nats.aio.client.Client):
    """Delivers to `handlers`, by subscription number.

    A handler that raises is logged: an exception that reached nats-py would end its read loop in silence.
    """

    def __init__(self) -> None:
        check_nats_py()
        super().__init__()
        self.handlers: dict[int, Handler] = {}
        self.challenge: Callable[[], tuple[str, Callable[[str], bytes]]] | None = None
        """Called before each connection: our JWT, and what signs the broker's challenge."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        handler = self.handlers.get(sid)
        if handler is None:
            return
        try:
            handler(subject, reply, data, headers)
        except Exception:  # one bad message must not end nats-py's read loop, and with it the connection
            logger.exception("error while handling a message on %s", subject.decode(errors="replace"))

    async def _connect_to_server(self, s: nats.aio.client.Srv) -> None:
        """Connect as nats-py does, but close what a failed attempt (a refused login, say) left open."""
        s.last_attempt = time.monotonic()
        if isinstance(self._transport, _Transport):
            self._transport.close()
        self._transport = _Transport()
        if self.challenge is not None:
            jwt, self._signature_cb = self.challenge()
            self._user_jwt_cb = lambda: bytearray(jwt.encode())
            self._auth_configured = True
        await self._transport.connect(s.uri, nats.aio.client.DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect where our key has expired or was revoked: its file may hold another one by now."""
        if USER_AUTHENTICATION in err_msg and not self.is_connecting:
            await self._process_op_err(nats.errors.AuthorizationError())
        else:
            await super()._process_err(err_msg)


class _TlsProtocol(asyncio.StreamReaderProtocol):
    """asyncio's stream, told that it is encrypted, which it cannot see of a connection that became so.

    Without that each closed connection is a warning of asyncio's, and each failed handshake a traceback that no caller
    can retrieve: in the output of somebody's training script.
    """

    is_up = False
    """Whether the handshake is over. What makes it fail is raised where it is waited for."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # an encrypted connection cannot stay half open

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc if self.is_up else None)


class _Transport(TcpTransport):
    """nats-py's, whose wait for a connection to close never ends when its TLS handshake has failed.

    CONNECT goes out together with the PING behind it: a broker that refuses a login answers why and closes, and a PING
    that came after that would reset the connection, and with it drop the answer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = b""

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        assert self._io_writer is not None, "connect comes first"
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=buffer_size)
        protocol = _TlsProtocol(reader)
        host = uri if isinstance(uri, str) else uri.hostname
        async with asyncio.timeout(connect_timeout):
            tls = await loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=host)
        assert tls is not None, "it is open: no other task closes it"
        protocol.is_up = True
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(tls, protocol, reader, loop)

    def write(self, payload: bytes) -> None:
        if payload.startswith(b"CONNECT "):
            self._held = payload
            return
        held, self._held = self._held, b""
        super().write(held + payload)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        super().close()  # type: ignore[no-untyped-call]

    async def wait_closed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super().wait_closed()  # type: ignore[no-untyped-call]


def check_nats_py() -> None:
    """See that nats-py still hands messages over where we take them.

    Raises:
        BusError: when it does not; naming its version.
    """
    method = getattr(nats.aio.client.Client, "_process_msg", None)
    if method is None or list(inspect.signature(method).parameters) != _PARAMETERS:
        raise BusError(
            f"nats-py {nats.aio.client.__version__} hands messages over in another way than 2.16: install nats-py 2.16"
        )


class Status(NamedTuple):
    """A status: its code, its words, and how many messages an ended request has left over."""

    code: int
    text: str
    num_pending: int


def parse_status(headers: bytes) -> Status:
    """The status in raw headers; code 0 when they have none."""
    line, *fields = headers.split(b"\r\n")
    code, _, text = line[len(_PREFIX) :].partition(b" ")
    if not line.startswith(_PREFIX) or not code.isdigit():
        return Status(0, "", 0)
    num_pending = 0
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() in _PENDING and value.strip().isdigit():
            num_pending = int(value)
    return Status(int(code), text.decode(errors="replace").strip(), num_pending)
