"""The same floods by the key of each role: what is refused, what it does to honest jobs, which alarm shows it."""

import asyncio
import functools
import itertools
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
from bench.floods.deployment import User
from bench.floods.measurement import HONEST_JOBS, Delays, Honest, honest_with_keys, send_beside
from bench.floods.senders import FLOODS, HOSTILE_JOB, SMALL_BYTES, Flood, Sent, consumers_of, unheard
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkError
from bench.harness.steady_job import NODE
from bench.messages.load import Parcel
from prometheus_client.parser import text_string_to_metric_families

from dynamix.cli.services import SERVICES
from dynamix.runtime.bus.broker.login import API
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.kinds import KINDS, WATCHER, Kind
from dynamix.schemas.messages import Live
from dynamix.schemas.streams import FEED, STREAMS

HOSTILE_NODE = "node-z"
HOSTILE_USERS = {
    "trainer": User("hostile-trainer", "trainer", (HOSTILE_JOB.partition("-")[0],)),
    "collector": User("hostile-collector", "collector", (HOSTILE_NODE,)),
    "reward": User("hostile-reward", "reward", ("hostile",)),
    "arbitrator": User("hostile-arbitrator", "arbitrator"),
    "learner": User("hostile-learner", "learner"),
    WATCHER: User("hostile-watcher", WATCHER),
}
"""Each with a key as it is given out: for one job, node or instance where it can be. `provision` may remove streams."""

ONLY_BY_ROLE = ("feed-consumers", "requests", "own-kinds")
"""Names of what is sent beside the floods of a trainer."""

READS = {"trainer": "report", "collector": "report", "reward": "window"}
"""What a key may read of FEED, if only by its own consumer; `state` for all others."""

ALERTS = {
    "bus_too_many_requests": "DynamixBrokerFlooded",
    "reports_passed_over": "DynamixCollectorFlooded",
    "dead_letters": "DynamixDeadLetters",
}
"""Alerts by the counter of a service that raises them, as deploy/prometheus/alerts.yaml has them."""
MIN_FULL_RATIO, MAX_SPAN_S = 0.9, 600.0
"""DynamixFeedFlooded."""
RATES_OVER_S = 120.0
"""DynamixRequestsFlooded and DynamixStreamJunk look so far back; one flood takes less."""
MAX_REQUESTS_PER_S = 300
MAX_JUNK_PER_S, MESSAGES_OF_A_STATE = 200, 10
HANDLED = "dynamix_messages_handled_total"
MESSAGE_STREAMS = [stream for stream in STREAMS if not stream.bucket]
BEAT_TIMEOUT_S = 30.0


class Seen(NamedTuple):
    """What alerts look at, at one moment."""

    time_s: float
    counted: Mapping[str, int]
    """By alert, of those that are raised when a number grows."""
    num_requests: int
    """To JetStream's API."""
    num_stored: int
    """In all streams of messages."""
    num_states: int
    """Read by the arbitrator."""

    def raised_since(self, before: "Seen") -> tuple[str, ...]:
        """The alerts that are raised now, and were not before a flood that began then."""
        found = [alert for alert, value in self.counted.items() if value > before.counted[alert]]
        num_states = (self.num_states - before.num_states) * RATES_OVER_S / (self.time_s - before.time_s)
        num_junk = self.num_stored - before.num_stored - MESSAGES_OF_A_STATE * num_states
        if num_junk > MAX_JUNK_PER_S * RATES_OVER_S:
            found.append("DynamixStreamJunk")
        if self.num_requests - before.num_requests > MAX_REQUESTS_PER_S * RATES_OVER_S:
            found.append("DynamixRequestsFlooded")
        return tuple(found)


class RoleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one flood by the key of a role did to honest jobs."""

    role: str
    flood: str
    what: str
    count: int
    sent: Sent
    flooded: Delays
    num_out_of_chain: int
    num_violations: int
    """Lines of the broker's log that say who was refused what."""
    alerts: tuple[str, ...]
    """Those that are raised, and were not before."""


class RoleReport(msgspec.Struct, frozen=True, kw_only=True):
    """All floods by one role's key, on one broker, one after the other."""

    role: str
    calm: Delays
    results: tuple[RoleResult, ...]


def floods_of(role: str) -> dict[str, Flood]:
    """Those of a trainer, and what only this key may send."""
    own: dict[str, Flood] = {
        "feed-consumers": Flood(
            "durable consumers on FEED", 1000, consumers_of(FEED, READS.get(role, "state"), HOSTILE_NODE)
        ),
        "requests": Flood("requests for the state of FEED", 100_000, _request),
    }
    if subjects_of_role(role):
        sending = unheard(functools.partial(_own_kinds, role))
        own["own-kinds"] = Flood("junk messages of 100 B, of all kinds that the key may send", 200_000, sending)
    return {**FLOODS, **own}


def subjects_of_role(role: str) -> list[str]:
    """What a role's key may publish to a stream: in the name of an honest job where it may, and harms not by design."""
    return [_subject(role, kind) for kind in KINDS if role in kind.senders and kind.stream is not None]


def send_as(role: str, flood: str, count: int, settings: BusSettings) -> Sent:
    """Send so many of a kind; for a process of its own."""
    return run_with_uvloop(floods_of(role)[flood].send(settings, count))


async def measure_role(
    role: str, *, size: float, calm_s: float, after_s: float, only: Sequence[str] = ()
) -> RoleReport:
    """Send one flood after the other by the key of a role, to one broker and its services.

    Raises:
        SteadyJobError: when a service ended, or a window was not decided at all.
    """
    hostile, floods = HOSTILE_USERS[role], floods_of(role)
    async with honest_with_keys(1, hostile.name, [hostile]) as honest:
        begin = honest.reported()
        await asyncio.sleep(calm_s)
        async with honest.all_decided():
            calm = honest.delays(begin, honest.reported())
        results = []
        for name in (name for name in floods if not only or name in only):
            count = max(1, round(floods[name].full * size))
            results.append(await _measured(honest, role, name, count, after_s))
        return RoleReport(role=role, calm=calm, results=tuple(results))


async def _measured(honest: Honest, role: str, name: str, count: int, after_s: float) -> RoleResult:
    broker = honest.broker
    assert broker is not None, "roles have keys on the broker of a deployment only"
    before, num_violations = await _seen(honest, broker.metrics_port), broker.num_violations()
    begin, broken = honest.reported(), _num_out_of_chain(honest)
    sent = await send_beside(honest, functools.partial(send_as, role, name), count, after_s)
    async with honest.all_decided():
        flooded = honest.delays(begin, honest.reported())
    after = await _seen(honest, broker.metrics_port)
    return RoleResult(
        role=role,
        flood=name,
        what=floods_of(role)[name].what,
        count=count,
        sent=sent,
        flooded=flooded,
        num_out_of_chain=_num_out_of_chain(honest) - broken,
        num_violations=broker.num_violations() - num_violations,
        alerts=after.raised_since(before),
    )


def _num_out_of_chain(honest: Honest) -> int:
    return sum(job.num_out_of_chain() for job in honest.jobs)


async def _seen(honest: Honest, metrics_port: int) -> Seen:
    """What raises alerts: sums over the next heartbeats of the services, and what the broker says."""
    found: dict[str, Mapping[str, int]] = {}
    try:
        async with asyncio.timeout(BEAT_TIMEOUT_S), _beats(honest) as beats:
            async for beat in beats:
                found[beat.service] = beat.counters
                if found.keys() >= set(SERVICES):
                    break
    except TimeoutError:
        raise BenchmarkError(f"of the services only these beat: {', '.join(found) or 'none'}") from None
    states = {stream: await honest.watcher.stream_state(stream.name) for stream in MESSAGE_STREAMS}
    feed = states[FEED]
    is_flooded = feed.num_bytes > MIN_FULL_RATIO * FEED.max_bytes and feed.span_s < MAX_SPAN_S
    sums = {alert: sum(beat.get(name, 0) for beat in found.values()) for name, alert in ALERTS.items()}
    return Seen(
        time.monotonic(),
        {**sums, "DynamixFeedFlooded": int(is_flooded)},
        await honest.watcher.count_requests(),
        sum(state.last_sequence for state in states.values()),
        await asyncio.to_thread(_num_states, metrics_port),
    )


def _num_states(metrics_port: int) -> int:
    """How many states the arbitrator has read, as a scrape of it has them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=BEAT_TIMEOUT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    handled = [sample for family in families for sample in family.samples if sample.name == HANDLED]
    return sum(int(sample.value) for sample in handled if sample.labels["kind"] == "state")


@asynccontextmanager
async def _beats(honest: Honest) -> AsyncIterator[AsyncIterator[Live]]:
    async with honest.watcher.subscribe(subjects.of("live", subjects.ANY, NODE)) as messages:
        yield (decode(Live, message.subject, message.payload) async for message in messages)


def _subject(role: str, kind: Kind) -> str:
    """An arbitrator's junk is of a job of its own: by design it decides all jobs."""
    job = HOSTILE_JOB if role in ("trainer", "arbitrator") else HONEST_JOBS[0]
    node = HOSTILE_NODE if role == "collector" else NODE
    tokens = {"job": job, "node": node, "kind": "report"}
    return subjects.of(kind.name, *(tokens.get(token, "flood") for token in kind.tokens))


def _own_kinds(role: str, count: int) -> Iterator[Parcel]:
    parcels = itertools.cycle([Parcel(subject, bytes(SMALL_BYTES), "") for subject in subjects_of_role(role)])
    return itertools.islice(parcels, count)


async def _request(settings: BusSettings, count: int) -> Sent:
    one = Parcel(f"{API}STREAM.INFO.{FEED.name}", b"", "")
    sent = await unheard(lambda count: itertools.repeat(one, count), is_answered=True)(settings, count)
    return msgspec.structs.replace(sent, accepted=count - sent.denied, refused=sent.denied)
