"""Metrics of the arbitrator: where each job stands, refusals, how runs ended and differed."""

import asyncio
import contextlib
import logging
import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamix.runtime.bus import Bus, PermissionDeniedError, StreamState
from dynamix.runtime.metrics import LabelTable, Scrape, ServiceMetrics
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_or_none
from dynamix.schemas.features import GLOBAL_INDEX, unpack_global
from dynamix.schemas.messages import REFUSALS, Applied, Job, State
from dynamix.schemas.streams import ACTIONS, DEAD, FEED, JOBS, PROFILES, REPORTS

from .deciding.job_log import JobLog
from .deciding.signatures import MIN_RUNS, variation_between
from .policies.policy import steps_of
from .policies.rule import COMPLETED, ENDS, LEFT, class_of_end

logger = logging.getLogger(__name__)

COUNTERS = {
    "decided": "actions stored",
    "adopted": "actions of another arbitrator, or of an earlier start, that were adopted",
    "halted": "generations of jobs without decisions, each with its reason in the log",
    "refused_logs": "of those, since the stored actions cannot be trusted",
    "jobs_put_off": "states of jobs that could not wait to be opened, since too many did",
    "states_put_off": "states of jobs that sent more than could be decided: they are read again",
    "profiles_stored": "runs whose knowledge was stored for their job family",
    "begun_with_profile": "generations that started from what earlier runs of their family learned",
    "profiles_ignored": "generations that could not use their family's profile, each reason once in the log",
    "size_stuck": "times that sizes began to be stuck at a bound",
}
GAUGES = {"jobs": "jobs held in memory", "jobs_waiting": "jobs that wait to be opened, or are being opened"}
OTHER_REASON = "other"
"""Refusals for a reason that no trainer of ours gives."""
MAX_OVER = 1000
STREAMS_EVERY_S = 10.0
VIOLATIONS_EVERY_S = 1.0
VIOLATION = re.compile(rb"Violation|maximum (subscriptions|connections|account active connections) exceeded")
"""In a line of nats-server's log for each refused operation; that of a permission names the key and the subject."""
MAX_READ_BYTES = 16 << 20


class NewLines:
    """Lines appended to a log file from now on, also after the file was rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._at = 0, 0
        with contextlib.suppress(OSError):
            status = path.stat()
            self._inode, self._at = status.st_ino, status.st_size

    def count(self, pattern: re.Pattern[bytes]) -> int:
        """Number of lines since the last call with a match. Raises OSError when the file cannot be read."""
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._at:
                self._inode, self._at = status.st_ino, 0
            file.seek(self._at)
            lines = file.read(MAX_READ_BYTES).rpartition(b"\n")[0]
            self._at += len(lines) + 1 if lines else 0
        return sum(pattern.search(line) is not None for line in lines.split(b"\n"))


MAX_RUNS = 8
"""Ended runs of one name that are compared: the newest."""
MAX_POINTS = 512
"""Improvements of one run that are kept."""
MAX_NAMES = 100


@dataclass(eq=False)
class Curve:
    """The held-out accuracy of one run."""

    time_s: float = 0.0
    """Training so far."""
    best: list[tuple[float, float]] = field(default_factory=list)
    """Training time and accuracy, whenever it was the best so far."""


class RunTimes:
    """Compares ended runs by name, without the id of the run, and policy.

    A run that reports no held-out accuracy is not compared.
    """

    def __init__(self) -> None:
        self.running: LabelTable[str, Curve] = LabelTable(MAX_NAMES)
        self._ended: dict[tuple[str, str], deque[Curve]] = {}

    def record_window(self, job: str, time_s: float, held_out_accuracy: float) -> None:
        """Add a window's training time, and the newest evaluation, NaN without one, to a run."""
        curve = self.running.get(job) or Curve()
        curve.time_s += time_s
        if held_out_accuracy > (curve.best[-1][1] if curve.best else -math.inf) and len(curve.best) < MAX_POINTS:
            curve.best.append((curve.time_s, held_out_accuracy))
        self.running.record(job, curve)

    def end_run(self, job: str, policy: str) -> None:
        """Compare a run from now on; it ended as it should. Windows that are still on their way are added later."""
        curve, kind = self.running.get(job) or Curve(), (job.rpartition("-")[0], policy)
        self.running.record(job, curve)
        runs = self._ended.pop(kind, deque(maxlen=MAX_RUNS))
        if curve not in runs:
            runs.append(curve)
        self._ended[kind] = runs  # the newest, which is dropped last
        if len(self._ended) > MAX_NAMES:
            del self._ended[next(iter(self._ended))]

    def variations(self) -> dict[tuple[str, str], float]:
        """The coefficient of variation between the times of each name and policy with enough runs."""
        found = {}
        for kind, ended in list(self._ended.items()):
            runs = [list(curve.best) for curve in list(ended) if curve.best]
            if len(runs) >= MIN_RUNS:
                common = min(run[-1][1] for run in runs)  # the best accuracy that all of them reached
                found[kind] = variation_between([next(at for at, reached in run if reached >= common) for run in runs])
        return found


@dataclass
class JobStanding:
    """State of one job, for its metrics."""

    generation: int
    window: int
    """The newest of its states."""
    began_s: float
    """When the first state of that window came."""
    window_s: float | None = None
    """Time between the last two windows."""
    decided_window: int = -1
    global_batch_size: int | None = None
    stuck_share: float = 0.0
    halted: bool = False
    num_refused: Mapping[str, int] = field(default_factory=dict)
    """Actions that its trainer has refused, by reason."""


class ShownDecisions:
    """Keeps the state of each job for the metrics; without a port of metrics nothing is kept."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics
        self._jobs: LabelTable[str, JobStanding] = LabelTable()
        self._over: LabelTable[str, int] = LabelTable(MAX_OVER)
        """The newest generation that has ended: its last states come after the end, from another stream."""
        self._ends = Counter(dict.fromkeys(ENDS, 0))
        self._runs = RunTimes()
        self._streams: dict[str, StreamState] = {}
        self._num_requests: int | None = None
        self._num_violations: int | None = None
        metrics.declare(counters=COUNTERS, gauges=GAUGES)
        metrics.add(self.show)

    def record_state(self, state: State) -> None:
        """Note that a state came."""
        over = self._over.get(state.job)
        if not self._metrics.is_served or (over is not None and state.generation <= over):
            return
        standing, now_s = self._jobs.get(state.job), time.monotonic()
        if standing is None or standing.generation != state.generation:
            standing = JobStanding(state.generation, state.window, now_s)
        elif state.window > standing.window:
            standing.window_s = (now_s - standing.began_s) / (state.window - standing.window)
            standing.window, standing.began_s = state.window, now_s
        self._jobs.record(state.job, standing)

    def record_folded(self, state: State, log: JobLog) -> None:
        """Note what was decided after a state, and how the run goes."""
        if not self._metrics.is_served:
            return
        if state.node == log.job.nodes[0].node:  # every node's state has the same numbers of the whole job
            features = unpack_global(state)
            step_time_s, accuracy = (float(features[GLOBAL_INDEX[n]]) for n in ("step_time_s", "held_out_accuracy"))
            time_s = 0.0 if math.isnan(step_time_s) else step_time_s * steps_of(log.job, features)
            self._runs.record_window(state.job, time_s, accuracy)
        standing = self._jobs.get(state.job)
        if standing is None:
            return
        if log.known is not None and log.known.action.generation == state.generation:
            standing.decided_window = log.known.action.window
            standing.global_batch_size = sum(log.known.action.local_batch_sizes)
        standing.stuck_share = 0.0 if log.watch is None else log.watch.stuck_share

    def record_halt(self, job: str, generation: int) -> None:
        """Note that a generation is not decided."""
        standing = self._jobs.get(job)
        if standing is not None and standing.generation == generation:
            standing.halted = True

    def record_receipt(self, receipt: Applied) -> None:
        """Note which actions the trainer has refused until it adopted this one."""
        standing = self._jobs.get(receipt.job)
        if standing is not None and standing.generation == receipt.generation:
            found: Counter[str] = Counter()
            for reason, count in receipt.num_refused.items():  # made-up reasons together: labels must be few
                found[reason if reason in REFUSALS else OTHER_REASON] += count
            standing.num_refused = found

    def record_end(self, job: Job) -> None:
        """Note that a run is over."""
        end = class_of_end(job.end_reason)
        self._ends[end] += 1
        self._jobs.drop(job.job)
        self._over.record(job.job, job.generation)
        if end in {COMPLETED, LEFT}:
            self._runs.end_run(job.job, job.policy)
        else:
            self._runs.running.drop(job.job)  # it failed, or was stopped: it is not compared

    async def follow_broker(
        self, state_of: Callable[[str], Awaitable[StreamState]], count_requests: Callable[[], Awaitable[int]]
    ) -> None:
        """Note what the streams hold and how many requests the broker has had, every `STREAMS_EVERY_S`."""
        names, counts = [stream.name for stream in (REPORTS, FEED, JOBS, ACTIONS, DEAD, PROFILES)], True
        while True:
            for name in tuple(names):
                try:
                    self._streams[name] = await state_of(name)
                except PermissionDeniedError as error:
                    names.remove(name)
                    logger.warning("%s is not watched: %s; run `dynamix keys refresh`", name, error)
            if counts:
                try:
                    self._num_requests = await count_requests()
                except PermissionDeniedError as error:
                    counts = False
                    logger.warning("requests to the broker are not counted: %s; run `dynamix keys refresh`", error)
            await asyncio.sleep(STREAMS_EVERY_S)

    async def follow_violations(self, log: Path) -> None:
        """Count the operations that the broker refuses from now on, as its log has them, until cancelled."""
        lines = await asyncio.to_thread(NewLines, log)
        self._num_violations, warned = 0, False
        while True:
            await asyncio.sleep(VIOLATIONS_EVERY_S)
            try:
                self._num_violations += await asyncio.to_thread(lines.count, VIOLATION)
            except OSError as error:
                if not warned:
                    warned, fix = True, "let the arbitrator read it, or unset DYNAMIX_ARBITRATOR_BROKER_LOG"
                    logger.warning("refused operations are not counted: %s: %s; %s", log, error.strerror, fix)

    async def follow_ends(self, bus: Bus) -> None:
        """Note the end of every run until the intake ends."""
        async with bus.consume(JOBS.name, [subjects.of("job", subjects.ANY)], start="new") as consumer:
            async for batch in consumer:
                for message in batch:
                    # set aside where the specification is read for decisions
                    job = decode_or_none(Job, message.subject, message.payload)
                    if job is not None and job.phase == "ended":
                        self.record_end(job)

    async def follow_receipts(self, context: Context[Any]) -> None:
        """Note every receipt until the intake ends."""
        wanted = [subjects.of("applied", subjects.ANY)]
        async with context.bus.consume(FEED.name, wanted, start="new") as consumer:
            async for batch in consumer:
                for message in batch:
                    if (receipt := await context.decoded(Applied, message)) is not None:
                        self.record_receipt(receipt)

    def show(self, scrape: Scrape) -> None:
        """Show all that is kept."""
        for job, standing, age_s in self._jobs.entries():
            for name, meaning, value in (
                ("job_state_window", "newest window with a state", standing.window),
                ("job_decided_window", "newest decided window, -1 for none", standing.decided_window),
                ("job_state_age_seconds", "since the newest state of the job", age_s),
                ("job_window_seconds", "from one window to the next, the last time", standing.window_s),
                ("job_decided_global_batch_size", "sum of the newest decided sizes", standing.global_batch_size),
                ("job_stuck_ratio", "share of ranks whose size is stuck at a bound", standing.stuck_share),
                ("job_halted", "1 while this generation is not decided", int(standing.halted)),
            ):
                scrape.gauge(name, meaning, value, training_job=job)
            for reason, count in standing.num_refused.items():
                scrape.gauge(
                    "job_refused_actions",
                    "actions that the trainer refused in this generation before the newest one that it adopted",
                    count,
                    training_job=job,
                    reason=reason,
                )
        for end, count in self._ends.items():
            scrape.counter("jobs_ended", "runs that ended, by how", count, reason=end)
        for (name, policy), variation in self._runs.variations().items():
            scrape.gauge(
                "runs_variation_ratio",
                "coefficient of variation of the times to a common held-out accuracy, newest runs of a name",
                variation,
                training_name=name,
                policy=policy,
            )
        for name, state in self._streams.items():
            _show_stream(scrape, name, state)
        if self._num_requests is not None:
            what = "requests of all users to JetStream's API since the broker started"
            scrape.counter("broker_requests", what, self._num_requests)
        if self._num_violations is not None:
            what = "operations of all clients that the broker refused, by its log"
            scrape.counter("broker_violations", what, self._num_violations)
        scrape.counter("jobs_not_shown", "jobs left out since too many are active", self._jobs.num_evicted)


def _show_stream(scrape: Scrape, name: str, state: StreamState) -> None:
    if max_bytes := {REPORTS.name: REPORTS.max_bytes, FEED.name: FEED.max_bytes}.get(name):
        taken = state.num_bytes / max_bytes
        scrape.gauge("stream_full_ratio", "share of a stream's room that is taken", taken, stream=name)
        scrape.gauge("stream_span_seconds", "from oldest to newest message of a stream", state.span_s, stream=name)
    stored = "messages that a stream has taken since it was made, of all senders"
    scrape.counter("stream_stored", stored, state.last_sequence, stream=name)
    for copy in state.copies.behind:
        scrape.gauge(
            "stream_copy_lag",
            "entries that a copy which is not current, or whose server is offline, lacks",
            copy.lag,
            stream=name,
            server=copy.name,
        )
