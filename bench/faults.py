"""Faults and floods: `python -m bench.faults [faults] [floods]`; without a word: both.

faults  all of tests/faults at full counts, several times with other seeds, the failover of three servers among them.
        Each test ends by comparing with the reference fold (tests/support/reference_fold.py). The table has for each
        test in how many rounds it passed, its longest time, and the figures that it measured: times as the worst of
        all rounds, counts as their sum.
floods  the broker as deploy/ configures it, every user with a key, the real services, and two honest jobs that report a
        window every 0.2 s, while a trainer whose key is for its own job, or for all jobs, sends as much as the broker
        takes. The delay is that from a window's report to its action, without the flood and with it until some time
        after its end. Accepted is what the streams stored meanwhile. Every window must be decided once and in order.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET  # what pytest wrote a moment ago is read, nothing foreign
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from bench.harness import ROOT, BenchmarkError, Cell, Report, Table, Target, connected, parser, run, run_with_uvloop
from bench.jobs import NODE, NodeWindow, Parcel, SteadyJob, job_of, node_window, parcel, running_services

from dynamix.runtime.bus import BusError
from dynamix.runtime.bus.authority import PROVISION, Authority
from dynamix.runtime.bus.connection import BrokerConnection
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.read import make_durable
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.runtime.embedded import EmbeddedServerError, server_binary
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import MAX_TRAINER_BYTES
from dynamix.schemas.messages import Job, NodeRanks
from dynamix.schemas.streams import STREAMS
from dynamix.schemas.subjects import WATCHER

# --- faults ----------------------------------------------------------------------------------------------------------


def faults(options: argparse.Namespace) -> Report:
    """Run all rounds; a test that failed in any of them misses its target."""
    rounds: dict[str, list[tuple[bool, float, dict[str, str]]]] = {}
    for seed in range(1, 1 + options.rounds):
        with tempfile.TemporaryDirectory(prefix="dynamix-faults-") as directory:
            results = Path(directory) / "results.xml"
            command = [sys.executable, "-m", "pytest", "-q", "tests/faults", "--faults=full"]
            command += [f"--faults-seed={seed}", "-n", "3", "--dist=worksteal", "-p", "no:cacheprovider"]
            command += [f"--junitxml={results}", "-o", "junit_family=xunit1"]  # the other family has no properties
            command += ["-k", options.tests] if options.tests else []
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.stderr.write(done.stdout + done.stderr)
            for case in ET.parse(results).iter("testcase") if results.exists() else ():
                passed = all(case.find(end) is None for end in ("failure", "error", "skipped"))
                figures = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
                name = case.get("name", "").removeprefix("test_").replace("_", " ")
                rounds.setdefault(name, []).append((passed, float(case.get("time", "0")), figures))
    rows, targets = list[list[Cell]](), [Target("tests that ran", len(rounds), at_least=1)]
    for name, found in sorted(rounds.items()):
        sums: dict[str, Any] = {}
        for _, _, own in found:
            for figure, value in own.items():
                sums[figure] = _both(figure, sums.get(figure), value)
        counted = ", ".join(f"{figure.replace('_', ' ')} {value}" for figure, value in sums.items())
        num_passed = sum(passed for passed, _, _ in found)
        rows.append([name, f"{num_passed} of {len(found)}", max(seconds for _, seconds, _ in found), counted])
        if num_passed < options.rounds:
            targets.append(Target(f"{name}: passed", num_passed, at_least=options.rounds))
    return Report([Table("faults", ["fault", "passed", "worst, s", "counted in all rounds"], rows)], targets)


def _both(name: str, old: Any, new: str) -> Any:
    """Times as the worst, counts as the sum; a share (`300/300`) as the sum of both its sides."""
    if "/" in new:
        return "/".join(str(int(a) + int(b)) for a, b in zip((old or "0/0").split("/"), new.split("/"), strict=True))
    return max(old or 0.0, float(new)) if name.endswith("_s") else (old or 0) + int(new)


# --- floods: what is sent, in a process of its own -------------------------------------------------------------------

HOSTILE_JOB = "hostile-0a1b2c3d"
HONEST_JOBS = ("steady-0a1b2c3d", "steady-4e5f6a7b")
HOSTILE, OTHER_NODE, HONEST = "hostile", "node-b", "steady"
"""Who floods: a trainer with a key for jobs of that name, or the collector of another node; and the others' jobs."""
SMALL_BYTES = 100
LARGEST = f"{MAX_TRAINER_BYTES // 1024} KiB"
PER_CONNECTION = 200
"""Subscriptions tried on one connection."""
AT_ONCE = 10_000
"""Messages sent before the broker has read them: it reads as fast as it can, and queues or refuses."""


Sender = Callable[[int, BusSettings], Coroutine[Any, Any, float]]


class Flood(NamedTuple):
    """A kind of flood."""

    what: str
    full: int
    """Number that makes the full size."""
    send: Sender
    """Sends so many as fast as the broker takes them; the seconds that it took."""
    user: str = HOSTILE


def _on_one_node(name: str, num_ranks: int) -> tuple[Job, NodeWindow]:
    """A job whose ranks are all on the node of the honest jobs, and its first window, without sockets."""
    job = msgspec.structs.replace(
        job_of(name, num_ranks, "static"), nodes=(NodeRanks(node=NODE, ranks=tuple(range(num_ranks))),)
    )
    measured = node_window(job, job.nodes[0], np.random.default_rng(0))
    rows = tuple(msgspec.structs.replace(row, sockets=None, sockets_before=None) for row in measured.report.rows)
    return job, measured._replace(report=msgspec.structs.replace(measured.report, rows=rows))


def _jobs(count: int) -> Iterator[Parcel]:
    job, measured = _on_one_node("hostile-0", 4)
    for number in range(count):
        yield parcel(msgspec.structs.replace(job, job=f"hostile-{number}"))
        yield parcel(msgspec.structs.replace(measured.report, job=f"hostile-{number}"))


def _reports(num_ranks: int) -> Callable[[int], Iterator[Parcel]]:
    def parcels(count: int) -> Iterator[Parcel]:
        job, measured = _on_one_node(HOSTILE_JOB, num_ranks)
        yield parcel(job)  # which is steered: the services can use all of its reports
        for window in range(count):
            yield parcel(measured.at(window).report)

    return parcels


def _junk(num_bytes: int, kind: str, *nodes: str, num_runs: int = 1) -> Callable[[int], Iterator[Parcel]]:
    many = [Parcel(subjects.of(kind, f"hostile-{run}", *nodes), bytes(num_bytes), "") for run in range(num_runs)]
    return lambda count: itertools.islice(itertools.cycle(many), count)


def _acknowledged(parcels: Callable[[int], Iterator[Parcel]]) -> Sender:
    """Send and wait for acknowledgements, which is slower."""

    async def send(count: int, settings: BusSettings) -> float:
        async with connected(settings, "flood") as bus:
            begun, sent = time.monotonic(), list[asyncio.Future[int]]()
            for one in parcels(count):
                sent.append(await bus.publish_bytes_soon(*one))
                await asyncio.sleep(0)
            await asyncio.gather(*sent, return_exceptions=True)  # streams count what was stored
            return time.monotonic() - begun

    return send


def _unheard(parcels: Callable[[int], Iterator[Parcel]]) -> Sender:
    """Send without waiting for anything but that the broker has read it."""

    async def send(count: int, settings: BusSettings) -> float:
        connection = BrokerConnection(settings, "flood", None)
        await connection.open(wait=False)
        try:
            begun = time.monotonic()
            for number, one in enumerate(parcels(count), start=1):
                await connection.send(one.subject, one.payload, "")
                if number % AT_ONCE == 0:
                    await connection.round_trip(60)
            await connection.round_trip(60)
            return time.monotonic() - begun
        finally:
            await connection.close()

    return send


async def _subscriptions(count: int, settings: BusSettings) -> float:
    """Subscribe to so many subjects, each of which the key permits; the broker ends connections that have too many."""
    begun, sent = time.monotonic(), 0
    while sent < count:
        connection = BrokerConnection(settings, "flood", None)
        await connection.open(wait=False)
        with contextlib.suppress(BusError):
            for number in range(PER_CONNECTION):
                await connection.subscribe(f"{connection.inbox}.{number}", lambda *_: None)
            await connection.round_trip(1)
        await connection.close()
        sent += PER_CONNECTION
    return time.monotonic() - begun


async def _connections(count: int, settings: BusSettings) -> float:
    """Hold so many connections at once."""
    begun = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            connection = BrokerConnection(settings, "flood", None)
            await connection.open(wait=False)
            stack.push_async_callback(connection.close)
        return time.monotonic() - begun


FLOODS = {
    "empty": Flood("empty reports to the same collector", 20_000, _unheard(_junk(0, "report", NODE))),
    "empty-states": Flood("empty states of another node", 20_000, _unheard(_junk(0, "state", OTHER_NODE)), OTHER_NODE),
    "large": Flood(
        f"junk reports of {LARGEST} to the same collector", 1_000, _unheard(_junk(MAX_TRAINER_BYTES, "report", NODE))
    ),
    "larger": Flood(
        "the same, of 1,000 runs", 6_000, _unheard(_junk(MAX_TRAINER_BYTES, "report", NODE, num_runs=1_000))
    ),
    "small": Flood("junk receipts of 100 B", 500_000, _unheard(_junk(SMALL_BYTES, "applied"))),
    "large-receipts": Flood(
        f"junk receipts of {LARGEST} of 1,000 runs",
        6_000,
        _unheard(_junk(MAX_TRAINER_BYTES, "applied", num_runs=1_000)),
    ),
    "small-reports": Flood(
        "junk reports of 100 B to the same collector", 200_000, _unheard(_junk(SMALL_BYTES, "report", NODE))
    ),
    "runs": Flood("the same, of 10,000 runs", 200_000, _unheard(_junk(SMALL_BYTES, "report", NODE, num_runs=10_000))),
    "own-reports": Flood("good reports of 4 ranks to the same collector", 50_000, _unheard(_reports(4))),
    "many-ranks": Flood("good reports of 1,024 ranks to the same collector", 256, _acknowledged(_reports(1024))),
    "jobs": Flood("jobs of 4 ranks, each with a report to the same collector", 10_000, _acknowledged(_jobs)),
    "subscriptions": Flood(f"subscriptions by connections of {PER_CONNECTION}", 20_000, _subscriptions),
    "connections": Flood("connections at once", 2_000, _connections),
}


def send(name: str, count: int, settings: BusSettings) -> float:
    """Send so many of a kind, for a process of its own; the seconds that it took."""
    return run_with_uvloop(FLOODS[name].send(count, settings))


# --- floods: the broker of deploy/, services and honest jobs ---------------------------------------------------------

STORE = "/var/lib/dynamix-nats"


@contextlib.contextmanager
def _deployed(directory: Path, authority: Authority) -> Iterator[str]:
    """nats-server with deploy/nats.conf, but for TLS; its address."""
    (directory / "authority").mkdir(mode=0o700)
    authority.write(directory / "authority" / "authority.json")
    text = (ROOT / "deploy" / "nats.conf").read_text()
    assert STORE in text, f"deploy/nats.conf has another store than {STORE}"
    text = re.sub(r"^tls \{.*?^\}\n", "", text, flags=re.MULTILINE | re.DOTALL)
    (directory / "nats.conf").write_text(text.replace(STORE, str(directory / "store")))
    log = directory / "nats.log"
    ports = ["-p", "-1", "-m", "-1", "--ports_file_dir", str(directory), "-l", str(log)]
    with subprocess.Popen([str(server_binary()), "-c", str(directory / "nats.conf"), *ports]) as process:
        try:
            deadline, url = time.monotonic() + 20, ""
            while not url:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise BenchmarkError(f"nats-server did not start: {log.read_text() if log.exists() else 'no log'}")
                with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, StopIteration):
                    url = json.loads(next(directory.glob("*.ports")).read_text())["nats"][0]
                time.sleep(0.01)
            yield url
        finally:
            process.terminate()


def _delays(jobs: Sequence[SteadyJob], begin: Sequence[int], ends: Sequence[int]) -> tuple[str, float]:
    """Those of some windows of each job, all of which are decided; in words, and the longest in seconds."""
    waits_s = [wait for job, a, b in zip(jobs, begin, ends, strict=True) for wait in job.waits_s(range(a, b))]
    median, p95 = np.percentile(waits_s, [50, 95])
    return f"{1e3 * median:,.0f} / {1e3 * p95:,.0f} / {1e3 * max(waits_s):,.0f}", max(waits_s)


async def _flooded(name: str, count: int, calm_s: float, after_s: float) -> tuple[list[Cell], list[Target]]:
    """Run one flood on a broker and services of its own: a row of the table."""
    authority = Authority.new()
    keys = [(NODE, "collector", [NODE]), (OTHER_NODE, "collector", [OTHER_NODE]), ("reward", "reward", [NODE])]
    keys += [(name, "trainer", [name]) for name in (HOSTILE, HONEST)]
    keys += [(role, role, []) for role in ("arbitrator", PROVISION, WATCHER)]
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamix-floods-")))
        for holder, role, limits in keys:
            file = directory / f"{holder}.creds"
            file.touch(mode=0o600)
            file.write_text(authority.issue(holder, role, limits, days=1).text())
        url = stack.enter_context(_deployed(directory, authority))

        def settings_of(holder: str) -> BusSettings:
            holder = NODE if holder == "collector" else holder
            return BusSettings(url=url, creds_file=str(directory / f"{holder}.creds"))

        async with connected(settings_of(PROVISION), "provision-1") as operator:
            await provision(operator)
            for key in authority.keys:
                if key.durable:
                    await make_durable(operator.requests, *key.durable)
        watcher = await stack.enter_async_context(connected(settings_of(WATCHER), "watcher-1"))
        await stack.enter_async_context(running_services(settings_of, watcher))
        jobs = []
        for job in HONEST_JOBS:
            bus = await stack.enter_async_context(connected(settings_of(HONEST), f"trainer-{NODE}"))
            jobs.append(SteadyJob(bus, reader=watcher, name=job))
            await stack.enter_async_context(jobs[-1].running())

        async def num_stored() -> int:
            return sum([(await watcher.stream_state(stream.name)).last_sequence for stream in STREAMS])

        first = [len(job.reported_at) for job in jobs]
        await asyncio.sleep(calm_s)
        begin, stored = [len(job.reported_at) for job in jobs], await num_stored()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, initializer=begin_worker, initargs=(os.getpid(),)) as pool:
            settings = settings_of(FLOODS[name].user)
            seconds = await asyncio.get_running_loop().run_in_executor(pool, send, name, count, settings)
        await asyncio.sleep(after_s)
        async with contextlib.AsyncExitStack() as paused:
            for steady in jobs:
                await paused.enter_async_context(steady.paused(300))
            accepted = await num_stored() - stored  # a few hundred messages of the honest jobs are among them
            calm, _ = _delays(jobs, first, begin)
            flooded, longest_s = _delays(jobs, begin, [len(job.reported_at) for job in jobs])
            out_of_chain = sum(job.num_out_of_chain() for job in jobs)
    return [f"{count:,} {FLOODS[name].what}", accepted, seconds, calm, flooded], [
        Target(f"{name}: longest delay, s", longest_s, at_most=1.0),
        Target(f"{name}: actions out of their chain", out_of_chain, at_most=0),
    ]


def floods(options: argparse.Namespace) -> Report:
    """Run the floods, one after the other."""
    rows, targets = list[list[Cell]](), list[Target]()
    for name in options.flood or FLOODS:
        count = max(1, round(FLOODS[name].full * options.size))
        row, own = run_with_uvloop(_flooded(name, count, options.calm, options.after))
        rows.append(row)
        targets += own
        sys.stderr.write(f"  {' | '.join(map(str, row))}\n")
    columns = ["flood", "stored meanwhile", "in, s", "delay without it: median / p95 / longest, ms", "with it, ms"]
    return Report([Table("floods", columns, rows)], targets)


PARTS: dict[str, Callable[[argparse.Namespace], Report]] = {"faults": faults, "floods": floods}


def main() -> int:
    """Run the parts, print the tables; 1 when a test failed or an honest job waited too long."""
    made = parser(
        *("faults", __doc__),
        ("--rounds", 5, "of the faults, each with its own seed"),
        ("--tests", "", "only those whose names match, as pytest -k has it"),
        ("--size", 1.0, "of each flood, over the full one"),
        ("--calm", 10.0, "seconds without a flood"),
        ("--after", 10.0, "seconds after it that count as flooded"),
    )
    made.add_argument("part", nargs="*", choices=[*PARTS, []], help="(default: both)")
    made.add_argument("--flood", choices=FLOODS, action="append", help="only this one; may be repeated")
    options = made.parse_args()

    def measure() -> Report:
        found = [PARTS[part](options) for part in options.part or PARTS]
        return Report([one.tables[0] for one in found], [target for one in found for target in one.targets])

    return run("faults", options, measure, BusError, EmbeddedServerError)


if __name__ == "__main__":
    sys.exit(main())
