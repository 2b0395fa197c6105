"""The connection to the broker: who we are to it, nats-py's client with what we change of it, and its life.

nats-py parses the headers of every message, builds an object for it, puts that in a queue and wakes a task that awaits
a callback: more than half of the cost of receiving a message. `Client` hands each message straight to a handler. All
that overrides nats-py is in `Client` and `_Transport`. What
`BrokerConnection` adds: it reconnects for ever, never in clear where TLS is demanded, and says why it cannot.
"""

import asyncio
import base64
import collections
import contextlib
import datetime as dt
import hashlib
import hmac
import logging
import random
import re
import secrets
import ssl
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from urllib.parse import ParseResult, unquote, urlsplit

import nats
import nats.aio.client
import nats.errors
from nats.aio.subscription import Subscription as NatsSubscription
from nats.aio.transport import TcpTransport

from dynamix.runtime.credentials import Key
from dynamix.runtime.rate_limit import RateLimit
from dynamix.runtime.settings import BusSettings, check_bus, credential_in, password_of, redact_url, tls_context

from .errors import BusError, ConnectionClosedError, PermissionDeniedError

logger = logging.getLogger(__name__)

NOT_YET_VALID, EXPIRED = 9, 10
OTHER_NAME, OTHER_EMAIL, OTHER_ADDRESS = 62, 63, 64
"""OpenSSL's numbers: X509_V_ERR_... of x509_vfy.h."""

SIGNATURE_BYTES = 8
"""Bytes of the signature in a message's identity."""

API = "$JS.API."
"""Prefix of requests to JetStream."""


class Login:
    """The user of one connection. Files are read for each attempt to connect, so that what they hold can be replaced.

    Attributes:
        user: its name; empty without one.
        inbox: prefix of every subject that this connection listens to for replies: `_INBOX.<user>.<name>.<random>`.
            The user comes first because the broker's permissions are per user, and a wildcard is a whole token.
        has_key: whether a key signs the broker's challenge, in place of a password.
    """

    def __init__(self, settings: BusSettings, name: str) -> None:
        """Raises ValueError, naming the file, for a credential that cannot be used."""
        self._settings = settings
        self._credential = credential_in(settings)
        self.has_key = self._credential is not None
        owner = self._credential.name if self._credential else unquote(urlsplit(settings.url).username or "")
        self.user = owner if self.has_key else settings.user or owner
        parts = (re.sub(r"[^A-Za-z0-9_-]", "-", part) for part in (self.user, name) if part)
        self.inbox = ".".join(("_INBOX", *parts, secrets.token_hex(8)))
        self._secret = self._credential.seed.encode() if self._credential else b""

    @property
    def seconds_left(self) -> float | None:
        """Until the credential of the last attempt to connect expires; `None` where it never does."""
        expires_s = self._credential.expires_s if self._credential else None
        return None if expires_s is None else expires_s - time.time()

    def sign_id(self, message_id: str) -> str:
        """Sign a message's identity with this user's secret: the same after a restart, and in all its processes."""
        if not self._secret:
            with contextlib.suppress(OSError):  # a file that is gone now: after a restart identities are others
                self._secret = self.password().encode()
            self._secret = self._secret or secrets.token_bytes(32)
        return hmac.digest(self._secret, message_id.encode(), hashlib.sha256)[:SIGNATURE_BYTES].hex()

    def password(self) -> str:
        """The user's password."""
        return password_of(self._settings) or unquote(urlsplit(self._settings.url).password or "")

    def sign(self, nonce: str) -> bytes:
        """The answer to the broker's challenge; raises nats-py's error where the file is broken or another user's."""
        try:
            credential = credential_in(self._settings)
        except ValueError as error:
            raise nats.errors.Error(f"nats: {error}") from error
        assert credential is not None, "asked with a credential only"
        if credential.name != self.user:  # whose inbox it may not listen to
            what = f"{self._settings.creds_file} is now {credential.name}'s, not {self.user}'s"
            raise nats.errors.Error(f"nats: {what}: restart this process")
        self._credential = credential
        return base64.b64encode(Key(credential.seed).sign(nonce))

    def jwt(self) -> bytearray:
        """The JWT of the credential that `sign` read last."""
        assert self._credential is not None, "asked with a credential only"
        return bytearray(self._credential.jwt.encode())

    def refusal(self) -> str:
        """The message for a login that the broker refuses."""
        check, credential = "check DYNAMIX_NATS_USER and DYNAMIX_NATS_PASSWORD_FILE", self._credential
        if credential is not None:
            check = f"{self._settings.creds_file} was revoked, or is of another broker's authority"
            if credential.expires_s is not None and credential.expires_s <= time.time():
                when = dt.datetime.fromtimestamp(credential.expires_s, dt.UTC)
                check = f"{self._settings.creds_file} expired on {when:%Y-%m-%d %H:%M} UTC"
            check += "; replace it by a new one of `dynamix keys create`"
        elif not self.password():
            check = "there is no credential: set DYNAMIX_NATS_CREDS_FILE to a key of `dynamix keys create`"
        return f"{redact_url(self._settings.url)} refuses user {self.user!r}: {check}"


def is_refused_login(error: Exception) -> bool:
    """Whether nats-py reports that the broker refuses user, password or key."""
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower()


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
"""Headers with the number of remaining messages, of a request to a consumer and of one to a stream."""


class Client(nats.aio.client.Client):
    """Delivers to `handlers`, by subscription number.

    A handler that raises is logged: an exception that reached nats-py would end its read loop in silence.
    """

    def __init__(self, *, demands_tls: bool) -> None:
        super().__init__()
        self.handlers: dict[int, Handler] = {}
        self._demands_tls = demands_tls

    def _connect_command(self) -> bytes:
        """Called after the server's INFO: the last chance to send nothing, where TLS is demanded and not offered."""
        if self._demands_tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error("nats: the server offers no TLS although it is demanded: no password was sent")
        return super()._connect_command()

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
            self._transport.close()  # type: ignore[no-untyped-call]
        self._transport = _Transport()
        await self._transport.connect(s.uri, nats.aio.client.DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect where our key has expired or was revoked: its file may hold another one by now."""
        if USER_AUTHENTICATION in err_msg and not self.is_connecting:
            await self.force_reconnect()
        else:
            await super()._process_err(err_msg)


class _Transport(TcpTransport):
    """nats-py's, whose wait for a connection to close never ends when its TLS handshake has failed.

    CONNECT goes out together with the PING behind it: a broker that refuses a login answers why and closes, and a PING
    that came after that would reset the connection, and with it drop the answer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = b""

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,  # noqa: ARG002 - nats-py passes it
        connect_timeout: int,
    ) -> None:
        """Encrypt asyncio's stream: nats-py makes another one, which warns at its end that it is not told so."""
        assert self._io_writer is not None, "connect comes first"
        host = uri if isinstance(uri, str) else uri.hostname
        async with asyncio.timeout(connect_timeout):
            await self._io_writer.start_tls(ssl_context, server_hostname=host)

    def write(self, payload: bytes) -> None:
        if payload.startswith(b"CONNECT "):
            self._held = payload
            return
        held, self._held = self._held, b""
        super().write(held + payload)  # type: ignore[no-untyped-call]

    async def wait_closed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super().wait_closed()  # type: ignore[no-untyped-call]


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


RECONNECT_WAIT_S = 0.5
PING_INTERVAL_S = 2
MAX_OUTSTANDING_PINGS = 2
"""A server that is frozen or cut off keeps its connections open: after 4 to 6 s without an answer we go to another."""
WATCH_INTERVAL_S = 1.0
STALLED_AFTER_S = 60.0
"""Without an attempt to reconnect for this long, nats-py's own task for it must have died."""
LEAVE_AFTER_S = 5.0
"""A server that answers pings and stores nothing may be cut off from the others: where there are several, we go to
another so long after it is noticed. That takes 5 s, and a cluster without a leader elects one in 4 to 9 s."""
MAX_REFUSED_LOGINS = 3

Event = Literal["reconnected", "denied", "closed"]
BUS_COUNTERS = {
    "published": "messages acknowledged by the broker",
    "retries": "messages published again, since no acknowledgement came",
    "duplicates": "acknowledged as stored before",
    "too_many_requests": "messages that the broker refused for a moment, since a stream had too many to store",
    "publish_errors": "messages that the broker refused",
    "received": "messages read from streams",
    "received_twice": "of those, left out since they came before",
    "consumer_resets": "readers of streams that had to begin again",
    "dropped_live": "heartbeats that were not sent, without a connection",
    "dropped_received": "heartbeats not taken in time by their reader",
    "reconnects": "connections made again",
    "permission_denials": "subjects that the broker refused to this user",
}
"""Counters of a connection, with their meaning."""

_DENIED = re.compile(r'permissions violation for (publish|subscription)[^"]*"([^"]+)"', re.IGNORECASE)


class BrokerConnection:
    """One NATS connection that reconnects for ever; the only object that holds nats-py's client.

    Attributes:
        counters: what happened on it so far, by the names of `BUS_COUNTERS`.
        num_handled: messages that consumers handed out, by kind.
        connected: set while there is a connection.
        inbox: prefix of every subject that this connection listens to for replies (`Login.inbox`).
        is_stalled: whether the server stores nothing; after `LEAVE_AFTER_S` we go to another one, where there is one.
        login: our user.
    """

    def __init__(
        self, settings: BusSettings, name: str, on_closed: Callable[[str], None] | None, *, while_waiting: str = ""
    ) -> None:
        """`while_waiting` follows the warning that there is no broker: what that means and how to fix it."""
        check_bus(settings)
        self._while_waiting = while_waiting
        self.counters = dict.fromkeys(BUS_COUNTERS, 0)
        self.num_handled: collections.Counter[str] = collections.Counter()
        self.connected = asyncio.Event()
        self._settings = settings
        self.login = Login(settings, name)
        self.inbox = self.login.inbox
        self._name = name
        self._on_closed = on_closed
        self._client = Client(demands_tls=settings.demands_tls)
        self._wait = True
        self._opened = False
        self._closing = False
        self._reported = False
        self._refused_logins = 0
        self._last_attempt = time.monotonic()
        self._lost_server = ""
        """The address that the connection was lost to."""
        self._limit = RateLimit(per_s=1.0)
        self._logged_reasons: set[str] = set()
        """Logged reasons of failed connections since the last one: an equal failure is not logged again."""
        self._watcher: asyncio.Task[None] | None = None
        self._callbacks: dict[Event, list[Callable[..., None]]] = {"reconnected": [], "denied": [], "closed": []}
        self.is_stalled: Callable[[], bool] = lambda: False
        self._stalled_at: float | None = None

    async def open(self, *, wait: bool) -> None:
        """Connect; with `wait` try for ever.

        Raises:
            BusError: without `wait`, when the first attempt fails; in any case when the broker's certificate is not
                trusted.
            PermissionDeniedError: when the broker refuses user or password, whatever `wait` says.
        """
        self._wait = wait
        settings = self._settings
        options: dict[str, Any] = {}
        if (tls := tls_context(settings)) is not None:  # read at each start: a new authority needs no other settings
            options["tls"] = tls
        if self.login.has_key:
            options |= {"signature_cb": self.login.sign, "user_jwt_cb": self.login.jwt}
        elif self.login.user:
            options |= {"user": self.login.user, "password": self.login.password}
        try:
            await self._client.connect(
                servers=[url.strip() for url in settings.url.split(",")],
                name=self._name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnection,
                closed_cb=self._on_close,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # nats-py says int, asyncio gets it
                reconnect_to_server_handler=self._next_server,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=MAX_OUTSTANDING_PINGS,
                inbox_prefix=self.inbox,
                skip_subject_validation=True,  # ours are checked where they are made; this would be twice per message
                pending_size=0,  # buffer nothing while disconnected: our own tables know what to send again
                **options,
            )
        except BaseException:
            self._closing = True
            await self._client.close()
            raise
        self._opened = True
        self.connected.set()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self._name}")
        url = redact_url(settings.url)
        # as loud as the warning that it ends: a training script shows warnings only
        level = logging.WARNING if self._logged_reasons else logging.INFO
        logger.log(level, "connected to the broker at %s", url, extra={"connection": self._name})
        self._logged_reasons.clear()

    @property
    def is_closed(self) -> bool:
        """Whether it is closed for good."""
        return self._closing or self._reported or self._client.is_closed

    @property
    def max_payload(self) -> int:
        """The broker's limit for payload and headers together, in bytes."""
        return self._client.max_payload

    def when(self, event: Event, callback: Callable[..., None]) -> Callable[[], None]:
        """Call `callback` at each such event; returns a function that cancels it.

        `denied` passes the subject in small letters, as nats-py reports it, and a PermissionDeniedError; `closed` is
        when the broker closes the connection for good.
        """
        self._callbacks[event].append(callback)
        return lambda: self._callbacks[event].remove(callback)

    async def send(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> bool:
        """Hand a message to the socket. False while disconnected: nothing is buffered for later.

        Raises:
            ConnectionClosedError: when closed for good.
            BusError: when nats-py refuses the subject or a header.
        """
        if self.is_closed:
            raise ConnectionClosedError("the connection to the bus is closed")
        if not self.connected.is_set():
            return False
        try:
            await self._client.publish(subject, payload, reply, headers)
        except nats.errors.ConnectionClosedError as error:
            raise ConnectionClosedError("the connection to the bus is closed") from error
        except nats.errors.OutboundBufferLimitError:
            return False
        except nats.errors.Error as error:
            raise BusError(f"cannot publish to {subject!r}: {describe(error)}") from error
        except (OSError, RuntimeError):  # the socket broke under nats-py's hands: it reconnects
            return False
        return True

    async def subscribe(self, subject: str, handler: Handler) -> NatsSubscription:
        """Listen to a subject; nats-py renews it after each reconnection.

        Raises:
            BusError: when the connection is closed.
            ValueError: when the subject has white space, which would end the protocol's line.
        """
        if not subject or any(character.isspace() for character in subject):
            raise ValueError(f"{subject!r} is no subject to listen to")
        if self.is_closed:
            raise ConnectionClosedError("the connection to the bus is closed")
        try:
            subscription = await self._client.subscribe(subject, cb=_never)
        except (nats.errors.Error, OSError) as error:
            raise BusError(f"cannot listen to {subject!r}: {describe(error)}") from error
        self._client.handlers[subscription._id] = handler  # noqa: SLF001 - nats-py shows it nowhere else
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        """Stop listening; harmless on a closed connection."""
        self._client.handlers.pop(subscription._id, None)  # noqa: SLF001 - see subscribe
        try:
            await subscription.unsubscribe()
        except (nats.errors.Error, OSError, RuntimeError) as error:
            logger.debug("unsubscribe: %s", error)

    async def round_trip(self, timeout_s: float) -> None:
        """Wait until the broker has handled everything sent so far. Raises BusError when it does not answer in time."""
        try:
            # nats-py's ping overtakes what waits for its flusher; when the first comes back the flusher has run
            await self._client.rtt(timeout_s)  # type: ignore[arg-type]  # nats-py says int and passes it to asyncio
            await self._client.rtt(timeout_s)  # type: ignore[arg-type]
        except nats.errors.Error as error:
            raise BusError(f"the broker did not answer within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Close for good; `on_closed` is not called."""
        self._closing = True
        self.connected.clear()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._client.close()

    def _next_server(
        self, servers: list[nats.aio.client.Server], _info: dict[str, Any]
    ) -> tuple[nats.aio.client.Server | None, float]:
        """The next server and the delay in seconds: spread, so that a restarted broker is not stormed.

        Of several servers the one that was lost comes last: frozen, it would take the connection and say nothing.
        """
        self._last_attempt = time.monotonic()
        server = min(
            servers,
            key=lambda server: (server.reconnects, server.uri.netloc == self._lost_server, random.random()),  # noqa: S311 - no secret
        )
        wait = 0.0 if server.reconnects == 0 else RECONNECT_WAIT_S
        return server, wait + random.uniform(0, RECONNECT_WAIT_S)  # noqa: S311 - no secret

    async def _on_error(self, error: Exception) -> None:
        """Error callback of nats-py; before it is connected, raising here is the one way to make it give up."""
        if not self._opened:
            if is_refused_login(error):
                raise PermissionDeniedError(self.login.refusal()) from error
            url = redact_url(self._settings.url)
            if not self._wait or isinstance(error, ssl.SSLCertVerificationError):
                raise BusError(f"cannot connect to {url}: {describe(error)}") from error
            if self._is_new_reason(error):
                meaning = f"; {self._while_waiting}" if self._while_waiting else ""
                logger.warning("waiting for the broker at %s: %s%s", url, describe(error), meaning)
            return
        if match := _DENIED.search(str(error)):
            self.counters["permission_denials"] += 1
            operation, subject = match[1].lower(), match[2]
            denial = PermissionDeniedError(
                f"the broker does not let user {self.login.user!r} {'publish' if operation == 'publish' else 'listen'} "
                f"to {subject}: its key is for another role, job, node or instance (`dynamix keys list`, SECURITY.md)"
            )
            for callback in list(self._callbacks["denied"]):
                callback(subject.lower(), denial)
        if is_refused_login(error):
            self._refused_logins += 1
            if self._refused_logins >= MAX_REFUSED_LOGINS:  # it came back with other users: end, to read ours again
                self._report_closed(self.login.refusal())
            return  # the end says why
        kind = type(error).__name__
        if self._limit.allow(kind) if self.connected.is_set() else self._is_new_reason(error):
            logger.warning("bus: %s", describe(error), extra={"suppressed": self._limit.suppressed(kind)})

    def _is_new_reason(self, error: Exception) -> bool:
        """Whether this failed attempt to connect tells more than those before it; remembers it."""
        known = describe(error) in self._logged_reasons
        self._logged_reasons.add(describe(error))
        return not known

    async def _on_disconnected(self) -> None:
        if (server := self._client._current_server) is not None:  # noqa: SLF001 - nats-py shows it while connected only
            self._lost_server = server.uri.netloc
        if self._opened and not self._closing:
            logger.warning("lost the connection to the bus; reconnecting")
        self.connected.clear()

    async def _on_reconnection(self) -> None:
        self.counters["reconnects"] += 1
        self._refused_logins = 0
        self._stalled_at = None
        self.connected.set()
        self._logged_reasons.clear()
        logger.warning("reconnected to the bus")  # as loud as its loss
        for callback in list(self._callbacks["reconnected"]):
            callback()

    async def _on_close(self) -> None:
        self._report_closed(str(self._client.last_error or "closed"))

    def _report_closed(self, reason: str) -> None:
        self.connected.clear()
        if self._closing or self._reported:
            return
        self._reported = True
        if not self._while_waiting:  # else the caller reports it, and connects again
            logger.error("the connection to the bus is closed for good: %s", reason)
        for callback in list(self._callbacks["closed"]):
            callback()
        if self._on_closed is not None:
            self._on_closed(reason)

    async def _watch(self) -> None:
        """Notice what nats-py does not report: a close without callback, a dead reconnection."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now = time.monotonic()
            if self._client.is_closed:
                await self._on_close()
            elif self.connected.is_set():
                self._last_attempt = now
                if not self.is_stalled():
                    self._stalled_at = None
                elif self._stalled_at is None:
                    self._stalled_at = now
                elif now > self._stalled_at + LEAVE_AFTER_S:
                    self._stalled_at = None
                    if len(self._client._server_pool) > 1:  # noqa: SLF001 - nats-py shows it nowhere else
                        logger.warning("the server answers and stores nothing; going to another one")
                        await self._client.force_reconnect()
            elif now - self._last_attempt > STALLED_AFTER_S:
                self._report_closed(f"no attempt to reconnect for {STALLED_AFTER_S:g} s")


def describe(error: Exception) -> str:
    """The error in words, without secrets; some of nats-py's have no text."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return redact_url(str(error)) or type(error).__name__
    fix = "name the certificate of the authority that signed it in DYNAMIX_NATS_CA_FILE"
    if error.verify_code in (NOT_YET_VALID, EXPIRED):
        fix = "look at the clocks of both machines, or give the broker a new certificate and restart it"
    elif error.verify_code in (OTHER_NAME, OTHER_EMAIL, OTHER_ADDRESS):
        fix = "name the broker in DYNAMIX_NATS_URL as its certificate does"
    return f"the broker's certificate is not trusted ({error.verify_message.rstrip('.')}): {fix}"


async def _never(_message: object) -> None:
    """Callback that nats-py never calls, because `Client` takes every message before."""
    raise AssertionError("a message went round our client")
