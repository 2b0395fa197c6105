"""Sends a rank's messages over the bus and receives actions and traces; imported only where there is a bus.

The bus client is a daemon thread with an event loop of its own. The training thread only appends to a bounded outbox
and reads a bounded inbox. Whatever happens to the bus - away, slow, closed, refused - happens in this thread; training
continues with the last sizes.
"""

import asyncio
import collections
import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Coroutine
from typing import Any

from dynamix.runtime.bus import Bus, BusError, BusMessage
from dynamix.runtime.bus.health import HEARTBEAT_S, DeadLetters, Watchdog, send_heartbeats
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.chain import is_intact
from dynamix.schemas.codec import MalformedMessageError, decode, decode_or_none, encode, message_id
from dynamix.schemas.messages import Action, Job, Live, Message, Report, Trace
from dynamix.schemas.messages.allocation import MAX_GENERATION
from dynamix.schemas.streams import ACTIONS, JOBS

from .transport import Transport

SERVICE = "trainer"
LOOK_EVERY_S = 10.0
"""Seconds between two checks that the broker still has the job's specification: one small request."""
RETRY_S = 1.0
"""Pause after the bus refused something that an operator may fix."""

CANCEL_AGAIN_S = 0.5

WITHOUT_BROKER = (
    "until it answers, training goes on without steering; start the services with `dynamix up`, and the script with "
    '`dynamix train` or after `eval "$(dynamix up --print-env)"`'
)
"""Effect of a missing broker on a training job, and the fix."""

_log = logging.getLogger("dynamix.trainer")


class BusClient(Transport):
    """The transport over the bus: publishes this rank's messages; global rank 0 gets its job's actions.

    Under `stigmergy` the first rank of each node gets the traces of the agent of that node.
    """

    def __init__(
        self,
        settings: BusSettings,
        *,
        node: str,
        outbox_messages: int,
        actions_of: str | None,
        traces_of: str | None = None,
    ) -> None:
        """Make the client without connecting; `traces_of` names the job whose traces are received."""
        super().__init__()
        self.outbox: deque[Message] = deque()
        """Messages that the bus has not acknowledged yet."""
        self._outbox_messages = outbox_messages
        self._lock = threading.Lock()
        """Guards the outbox over a few operations, never over I/O."""
        self._settings = settings
        self._node = node
        self._started_s = time.monotonic()
        self._counters: collections.Counter[str] = collections.Counter()
        self._actions_of = actions_of
        self._traces_of = traces_of
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._emptied = asyncio.Event()
        self._specification: Job | None = None
        """The job's while it runs, once published."""
        self._last_error = ""
        self._close_timeout_s: float | None = None
        """Set when the end is requested."""
        self._thread = threading.Thread(target=self._run, name="dynamix bus client", daemon=True)

    def start(self) -> None:
        """Start the thread, which connects and reconnects in the background."""
        self._thread.start()

    def publish(self, message: Message) -> None:
        """Hand a message over; returns at once.

        A full outbox gives up its oldest report: a fresh window is worth more than an old one, and a job's
        specification or an adoption is needed always.
        """
        if isinstance(message, Job):
            self._specification = message if message.phase == "running" else None
        with self._lock:
            if len(self.outbox) >= self._outbox_messages:
                reports = (n for n, each in enumerate(self.outbox) if n > 0 and isinstance(each, Report))
                if (oldest := next(reports, None)) is not None:  # the first message may be on its way
                    del self.outbox[oldest]
                    self.num_reports_dropped += 1
            self.outbox.append(message)
        self._call(self._wake.set)

    def begin_close(self, timeout_s: float) -> None:
        """End the thread once the outbox is empty, at the latest after `timeout_s`."""
        self._close_timeout_s = timeout_s
        self._call(self._closing.set)

    def close(self, timeout_s: float) -> None:
        """End the thread: wait at most `timeout_s` for the last messages and a little for the connection."""
        if self._thread.is_alive():
            self.begin_close(timeout_s)
            self._thread.join(timeout_s + RETRY_S)

    def _call(self, function: Any) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:  # noqa: BLE001 - a daemon thread's last word; training goes on
            _log.exception("the bus client ended; training goes on with its last sizes")

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._close_timeout_s is not None:  # asked to close before there was a loop
            self._closing.set()
        work = asyncio.create_task(self._work())
        await self._closing.wait()
        if self.outbox:
            self._emptied.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._close_timeout_s):
                    await self._emptied.wait()
        await _cancel(work)

    async def _work(self) -> None:
        """Connect, serve, and connect again when the connection is closed for good; whatever goes wrong is logged."""
        while True:
            try:
                await self._connect_and_serve()
            except (BusError, ValueError, OSError) as error:
                self._complain("cannot connect to the bus, so that training goes on without steering", error)
                await asyncio.sleep(RETRY_S)
            except Exception as error:  # noqa: BLE001 - what a broken broker provokes must not end the thread unheard
                self._complain(f"the bus client failed with {type(error).__name__}", error)
                await asyncio.sleep(RETRY_S)

    async def _connect_and_serve(self) -> None:
        closed = asyncio.Event()
        bus = await Bus.connect(
            self._settings,
            name=f"{SERVICE}-{self._node}",
            on_closed=lambda _reason: closed.set(),
            while_waiting=WITHOUT_BROKER,
        )
        duties: list[Coroutine[Any, Any, object]] = [closed.wait(), self._publish_all(bus), self._send_heartbeats(bus)]
        if (job := self._actions_of) is not None:
            duties += [self._listen(bus, subjects.of("action", job)), self._keep_specification(bus)]
        if (job := self._traces_of) is not None:
            duties.append(self._hear_traces(bus, subjects.of("trace", job, self._node)))
        tasks = [asyncio.create_task(duty) for duty in duties]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    self._complain("lost the bus", error)
                    await asyncio.sleep(RETRY_S)
        finally:
            await _cancel(*tasks)
            await bus.close()

    async def _publish_all(self, bus: Bus) -> None:
        while True:
            if not self.outbox:
                await self._wake.wait()
                self._wake.clear()
                continue
            message = self.outbox[0]
            try:
                await bus.publish(message)
            except MalformedMessageError as error:
                self._complain("dropped a message of our own", error)
            except BusError as error:
                self._complain("the bus does not take it; trying again", error)
                await asyncio.sleep(RETRY_S)  # a stream that is full refuses at once: without a pause we would spin
                continue
            with self._lock:
                self.outbox.popleft()
            if not self.outbox:
                self._emptied.set()

    async def _keep_specification(self, bus: Bus) -> None:
        """Publish the job's specification again when the broker has lost it or holds a made-up one in its place.

        Without it a restarted arbitrator decides nothing. One of a later start of this job is left alone.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            ours = self._specification
            if ours is None or self.outbox:
                continue
            try:
                stored = await bus.newest(JOBS.name, subjects.subject_of(ours))
                found = None if stored is None else decode_or_none(Job, stored.subject, stored.payload)
                is_later_start = found is not None and ours.generation < found.generation <= MAX_GENERATION
                if ours is self._specification and found != ours and not is_later_start:
                    identity = f"{message_id(ours)}:again:{uuid.uuid4().hex}"  # the broker has seen the usual one
                    await bus.publish_bytes(subjects.subject_of(ours), encode(ours), identity)
                    self._counters["specifications_again"] += 1
                    _log.warning("the broker had no longer the specification of %s: published again", ours.job)
            except BusError as error:
                self._complain("cannot see whether the specification is stored", error)

    async def _send_heartbeats(self, bus: Bus) -> None:
        async with Watchdog(0.0, tick_s=HEARTBEAT_S) as lag:
            ours = Live(service=SERVICE, instance=self._node, node=self._node, uptime_s=0.0)
            await send_heartbeats(
                bus, lag, lambda: {**self._counters, "reports_dropped": self.num_reports_dropped}, ours, self._started_s
            )

    async def _listen(self, bus: Bus, subject: str) -> None:
        """Receive actions, also those sent while the bus was away."""
        dead_letters = DeadLetters(bus, SERVICE, self._counters)
        while True:
            try:
                async with bus.follow(ACTIONS.name, subject) as messages:
                    async for message in messages:
                        try:
                            self.offer(_decode(message))
                        except MalformedMessageError as error:
                            self.num_malformed += 1
                            await dead_letters.set_aside(message, str(error))
            except BusError as error:
                self._complain("cannot listen to actions; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _hear_traces(self, bus: Bus, subject: str) -> None:
        """Receive traces as they are published; missed ones are not requested."""
        dead_letters = DeadLetters(bus, SERVICE, self._counters)
        try:
            async with bus.subscribe(subject) as messages:
                async for message in messages:
                    try:
                        self.leave_trace(decode(Trace, message.subject, message.payload))
                    except MalformedMessageError as error:
                        await dead_letters.set_aside(message, str(error))
        except BusError as error:
            self._complain("cannot hear traces, the ranks of this node keep their share", error)
        await asyncio.Event().wait()  # a duty that ends would end the others

    def _complain(self, what: str, error: BaseException) -> None:
        """Log a problem once, until it is another one."""
        text = f"{what}: {error}"
        if text != self._last_error:
            self._last_error = text
            _log.warning("%s", text)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel until it takes: connecting can swallow a cancellation (`asyncio.wait_for` of Python 3.11)."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


def _decode(message: BusMessage) -> Action:
    action = decode(Action, message.subject, message.payload)
    if action.hash and not is_intact(message.payload):
        raise MalformedMessageError(f"the action of window {action.window} does not have the hash of its content")
    return action


# --- earlier starts of a job

LOOKUP_S = 2.0
"""The longest that attaching waits for the bus. Without a broker the refused connection is an answer."""


def last_generation(settings: BusSettings, job: str, *, node: str) -> int | None:
    """The generation of the job's last start; `None` if there was none, or the bus does not answer in time.

    In a thread of its own: the caller may run an event loop.
    """
    found: list[int | None] = []

    async def look_up() -> int | None:
        async with asyncio.timeout(LOOKUP_S):
            bus = await Bus.connect(settings, name=f"{SERVICE}-{node}", wait=False)
            try:
                start = await bus.newest(JOBS.name, subjects.of("job", job))
                action = await bus.newest(ACTIONS.name, subjects.of("action", job))
            finally:
                await bus.close()
        # others' jobs can push a start out of its stream, but no action
        generations = [] if action is None else [decode(Action, action.subject, action.payload).generation]
        if start is not None:
            generation = decode(Job, start.subject, start.payload).generation
            if generation > MAX_GENERATION:
                _log.warning("%s has generation %d on the bus, which no job reaches: it was forged", job, generation)
            else:
                generations.append(generation)
        return max(generations, default=None)

    def ask() -> None:
        try:
            found.append(asyncio.run(look_up()))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the bus, training begins without an answer
            _log.info("cannot ask the bus for earlier starts of %s: %s: %s", job, type(error).__name__, error)

    thread = threading.Thread(target=ask, name="dynamix bus look-up", daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return found[0] if found else None
