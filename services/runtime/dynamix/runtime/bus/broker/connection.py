"""The connection: how nats-py is set up, what its callbacks do, and what happens when it closes."""

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Callable
from typing import Any

import nats.aio.client
import nats.errors
from nats.aio.subscription import Subscription as NatsSubscription

from dynamix.runtime.rate_limit import RateLimit
from dynamix.runtime.settings import BusSettings, check_bus, redact_url, tls_context

from .certificates import untrusted
from .client import Client, Handler
from .errors import BusError, ConnectionClosedError, PermissionDeniedError
from .login import API, Login, Sign, is_refused_login

logger = logging.getLogger(__name__)

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

DeniedCallback = Callable[[str, PermissionDeniedError], None]
"""Takes a subject in small letters, as nats-py reports it."""

_DENIED = re.compile(r'permissions violation for (publish|subscription)[^"]*"([^"]+)"', re.IGNORECASE)


class BrokerConnection:
    """One NATS connection that reconnects for ever; the only object that holds nats-py's client.

    Attributes:
        counters: what happened so far, by name.
        connected: set while there is a connection.
        inbox: prefix of every subject that this connection listens to for replies (`Login.inbox`).
    """

    api = API

    def __init__(
        self, settings: BusSettings, name: str, on_closed: Callable[[str], None] | None, *, while_waiting: str = ""
    ) -> None:
        """`while_waiting` follows the warning that there is no broker: what that means and how to fix it."""
        check_bus(settings)
        self._while_waiting = while_waiting
        self.counters: dict[str, int] = dict.fromkeys(
            ("errors", "reconnects", "slow_consumer_drops", "permission_denials"), 0
        )
        self.connected = asyncio.Event()
        self._settings = settings
        self._login = Login(settings, name)
        self.inbox = self._login.inbox
        self._name = name
        self._on_closed = on_closed
        self._client = Client()
        if self._login.has_key:
            self._client.challenge = self._challenge
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
        """Why there is no connection, as logged since the last one: a retry that fails alike is not logged again."""
        self._watcher: asyncio.Task[None] | None = None
        self._on_reconnected: list[Callable[[], None]] = []
        self._on_denied: list[DeniedCallback] = []
        self._on_closing: list[Callable[[], None]] = []
        self._is_stalled: list[Callable[[], bool]] = []
        self._stalled_at: float | None = None

    async def open(self, *, wait: bool) -> None:
        """Connect; with `wait` try for ever.

        Raises:
            BusError: without `wait`, when the first attempt fails; in any case when the broker's certificate is not
                trusted.
            PermissionDeniedError: when the broker refuses user or password, whatever `wait` says.
        """
        self._wait = wait
        try:
            await self._connect()
        except BaseException:
            self._closing = True
            await self._client.close()
            raise
        self._opened = True
        self.connected.set()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self._name}")
        url = redact_url(self._settings.url)
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

    def when_reconnected(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each reconnection; returns how to take that back."""
        self._on_reconnected.append(callback)
        return lambda: self._on_reconnected.remove(callback)

    def when_denied(self, callback: DeniedCallback) -> Callable[[], None]:
        """Call `callback` with each subject that the broker denies; returns how to take that back."""
        self._on_denied.append(callback)
        return lambda: self._on_denied.remove(callback)

    def when_closed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the connection is closed for good by the broker; returns how to take that back."""
        self._on_closing.append(callback)
        return lambda: self._on_closing.remove(callback)

    def leave_while(self, is_stalled: Callable[[], bool]) -> None:
        """Go to another server, where there is one, when `is_stalled` for `LEAVE_AFTER_S`."""
        self._is_stalled.append(is_stalled)

    @property
    def seconds_left(self) -> float | None:
        """Until our credential expires; `None` where it never does."""
        return self._login.seconds_left

    def sign_id(self, message_id: str) -> str:
        """What only our user can know of a message's identity."""
        return self._login.sign_id(message_id)

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

    async def _connect(self) -> None:
        settings = self._settings
        options: dict[str, Any] = {}
        if (tls := tls_context(settings)) is not None:  # read at each start: a new authority needs no other settings
            options["tls"] = tls
        if self._login.user and not self._login.has_key:
            options |= {"user": self._login.user, "password": self._password}
        await self._client.connect(
            servers=[url.strip() for url in settings.url.split(",")],
            name=self._name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnection,
            closed_cb=self._on_close,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # nats-py says int and passes it to asyncio
            reconnect_to_server_handler=self._next_server,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            inbox_prefix=self.inbox,
            skip_subject_validation=True,  # ours are checked where they are made; this would be twice per message
            pending_size=0,  # buffer nothing while disconnected: our own tables know what to send again
            **options,
        )

    def _challenge(self) -> tuple[str, Sign]:
        """Called before each connection; what signs is called after the server's INFO."""
        jwt, sign = self._login.challenge()

        def sign_unless_clear(nonce: str) -> bytes:
            self._refuse_clear_text()
            return sign(nonce)

        return jwt, sign_unless_clear

    def _refuse_clear_text(self) -> None:
        """See, after the server's INFO, that it speaks TLS where that is demanded: the last chance to send nothing."""
        info = self._client._server_info  # noqa: SLF001 - nats-py shows it nowhere else
        if self._settings.demands_tls and not info.get("tls_required"):
            raise nats.errors.Error("nats: the server offers no TLS although it is demanded: no password was sent")

    def _password(self) -> str:
        """Called by nats-py for each connection, after the server's INFO."""
        self._refuse_clear_text()
        return self._login.password()

    def _next_server(
        self, servers: list[nats.aio.client.Server], _info: dict[str, Any]
    ) -> tuple[nats.aio.client.Server | None, float]:
        """Where to reconnect and after how many seconds: spread, so that a restarted broker is not stormed.

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
        """What nats-py reports. Once connected it must never raise: that would end nats-py's read loop in silence."""
        if not self._opened:
            self._judge_first_error(error)  # raising here is the one way to make nats-py give up
            return
        try:
            self._note_error(error)
        except Exception:  # whatever it is: raised here it would end nats-py's read loop, and with it the connection
            logger.exception("error while handling an error of the connection")

    def _judge_first_error(self, error: Exception) -> None:
        if is_refused_login(error):
            raise PermissionDeniedError(self._login.refusal()) from error
        url = redact_url(self._settings.url)
        if not self._wait or isinstance(error, ssl.SSLCertVerificationError):
            raise BusError(f"cannot connect to {url}: {describe(error)}") from error
        if self._is_new_reason(error):
            meaning = f"; {self._while_waiting}" if self._while_waiting else ""
            logger.warning("waiting for the broker at %s: %s%s", url, describe(error), meaning)

    def _is_new_reason(self, error: Exception) -> bool:
        """Whether this failed attempt to connect tells more than those before it; remembers it."""
        known = describe(error) in self._logged_reasons
        self._logged_reasons.add(describe(error))
        return not known

    def _note_error(self, error: Exception) -> None:
        self.counters["errors"] += 1
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters["slow_consumer_drops"] += 1
        if match := _DENIED.search(str(error)):
            self._note_denial(match[1], match[2])
        if is_refused_login(error):
            self._refused_logins += 1
            if self._refused_logins >= MAX_REFUSED_LOGINS:  # it came back with other users: end, to read ours again
                self._report_closed(self._login.refusal())
            return  # the end says why
        kind = type(error).__name__
        if self._limit.allow(kind) if self.connected.is_set() else self._is_new_reason(error):
            logger.warning("bus: %s", describe(error), extra={"suppressed": self._limit.suppressed(kind)})

    def _note_denial(self, operation: str, subject: str) -> None:
        self.counters["permission_denials"] += 1
        verb = "publish to" if operation.lower() == "publish" else "listen to"
        denial = PermissionDeniedError(
            f"the broker does not let user {self._login.user!r} {verb} {subject}: its key is for another role, job, "
            "node or instance (`dynamix keys list`, SECURITY.md)"
        )
        for callback in list(self._on_denied):
            callback(subject.lower(), denial)

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
        for callback in list(self._on_reconnected):
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
        for callback in list(self._on_closing):
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
                if not any(is_stalled() for is_stalled in self._is_stalled):
                    self._stalled_at = None
                elif self._stalled_at is None:
                    self._stalled_at = now
                elif now > self._stalled_at + LEAVE_AFTER_S:
                    await self._leave()
            elif now - self._last_attempt > STALLED_AFTER_S:
                self._report_closed(f"no attempt to reconnect for {STALLED_AFTER_S:g} s")

    async def _leave(self) -> None:
        """Let nats-py treat the connection as lost: it goes to another server."""
        self._stalled_at = None
        if len(self._client._server_pool) > 1:  # noqa: SLF001 - nats-py shows it nowhere else
            logger.warning("the server answers and stores nothing; going to another one")
            await self._client._process_op_err(nats.errors.StaleConnectionError())  # noqa: SLF001 - as its own pings do


def describe(error: Exception) -> str:
    """The error in words, without secrets; some of nats-py's have no text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(error)
    return redact_url(str(error)) or type(error).__name__


async def _never(_message: object) -> None:
    """What nats-py would call, did `Client` not take every message before."""
    raise AssertionError("a message went round our client")
