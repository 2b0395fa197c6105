"""What reading and writing whole files costs beside nats-py: `python -m bench.objects [--json FILE] [--pairs N]`.

About a minute, nearly all of it nats-py's. One broker, one process, uvloop, random bytes. Each comparison alternates
ours and nats-py's own object store (ABBA) on the same bucket, so that both see the same machine, and is judged by the
median of the pairs' ratios. Both write the same layout, check the same digest and wait for acknowledgements.

put  `Bus.put_object` against `ObjectStore.put`, each time under a new name, which is deleted after the measurement.
get  `Bus.get_object` against `ObjectStore.get` of the same stored object.
"""

import argparse
import asyncio
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import nats
import uvloop
from bench.output import add_output_arguments, exit_code, write_json
from nats.js.object_store import ObjectStore

from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.provision import provision
from dynamix.schemas.streams import POLICIES

SIZES_MB = (1, 8, 32)
MB = 1 << 20
TARGET = 1.0
"""We must never be slower."""

Arm = Callable[[bytes], Awaitable[float]]
"""Does it once and returns the seconds."""


class Comparison(NamedTuple):
    """One row of the result."""

    name: str
    size_mb: int
    ours: Arm
    theirs: Arm


class Bench:
    """The arms, over one bucket."""

    def __init__(self, bus: Bus, theirs: ObjectStore) -> None:
        self._bus = bus
        self._theirs = theirs
        self._numbers = itertools.count(1)

    def comparisons(self, sizes_mb: list[int]) -> list[Comparison]:
        """All rows."""
        return [
            Comparison(name, size, ours, theirs)
            for size in sizes_mb
            for name, ours, theirs in (("put", self.put_ours, self.put_theirs), ("get", self.get_ours, self.get_theirs))
        ]

    async def store(self, data: bytes) -> None:
        """What `get` reads."""
        await self._bus.put_object(POLICIES.bucket, "stored", data)

    async def put_ours(self, data: bytes) -> float:
        """Our writer."""
        name = f"ours-{next(self._numbers)}"
        begin = time.perf_counter()
        await self._bus.put_object(POLICIES.bucket, name, data)
        duration = time.perf_counter() - begin
        await self._bus.delete_object(POLICIES.bucket, name)
        return duration

    async def put_theirs(self, data: bytes) -> float:
        """nats-py's writer."""
        name = f"theirs-{next(self._numbers)}"
        begin = time.perf_counter()
        await self._theirs.put(name, data)
        duration = time.perf_counter() - begin
        await self._bus.delete_object(POLICIES.bucket, name)
        return duration

    async def get_ours(self, data: bytes) -> float:
        """Our reader."""
        begin = time.perf_counter()
        found = await self._bus.get_object(POLICIES.bucket, "stored")
        duration = time.perf_counter() - begin
        assert found.data == data, "what was read is what was stored"
        return duration

    async def get_theirs(self, data: bytes) -> float:
        """nats-py's reader."""
        begin = time.perf_counter()
        found = await self._theirs.get("stored")
        duration = time.perf_counter() - begin
        assert found.data == data, "what was read is what was stored"
        return duration


async def compare(comparison: Comparison, data: bytes, num_pairs: int) -> dict[str, Any]:
    """Pairs of ours and theirs, in alternating order."""
    ours: list[float] = []
    theirs: list[float] = []
    arms = ((ours, comparison.ours), (theirs, comparison.theirs))
    label = f"{comparison.name} {comparison.size_mb} MB"
    for pair in range(-1, num_pairs):  # the first one warms up
        for seconds, arm in arms if pair % 2 else reversed(arms):
            gc.collect()
            duration = await arm(data)
            if pair >= 0:
                seconds.append(duration)
        print(f"\r{label}: pair {pair + 1} of {num_pairs}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return summary(comparison, ours, theirs)


def summary(comparison: Comparison, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Medians and spread of one comparison; a ratio above 1 says that we are faster."""
    ratios = sorted(their / our for our, their in zip(ours, theirs, strict=True))
    ratio = statistics.median(ratios)
    return {
        "name": comparison.name,
        "size_mb": comparison.size_mb,
        "num_pairs": len(ratios),
        "ours_mb_per_s": comparison.size_mb / statistics.median(ours),
        "nats_py_mb_per_s": comparison.size_mb / statistics.median(theirs),
        "ratio": ratio,
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "target": TARGET,
        "met": ratio >= TARGET,
    }


async def run(num_pairs: int, sizes_mb: list[int]) -> dict[str, Any]:
    """All comparisons over one broker."""
    async with EmbeddedServer() as server:
        settings = server.settings
        bus = await Bus.connect(settings, name="bench")
        client = await nats.connect(settings.url, user=settings.user, password=settings.password)
        try:
            await provision(bus)
            bench = Bench(bus, await client.jetstream().object_store(POLICIES.bucket))
            rows = []
            for comparison in bench.comparisons(sizes_mb):
                data = os.urandom(comparison.size_mb * MB)
                await bench.store(data)
                rows.append(await compare(comparison, data, num_pairs))
            retries = bus.counters["retries"]
        finally:
            await client.close()
            await bus.close()
    return {"retries": retries, "comparisons": rows}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"\n{result['retries']} retries")
    print(f"{'':<12}{'ours MB/s':>10}{'nats-py MB/s':>14}{'ratio':>8}  {'range':<14}target")
    for row in result["comparisons"]:
        label, spread = f"{row['name']} {row['size_mb']} MB", f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
        print(
            f"{label:<12}{row['ours_mb_per_s']:>10.0f}{row['nats_py_mb_per_s']:>14.0f}{row['ratio']:>8.2f}  "
            f"{spread:<14}>= {row['target']:g} {'met' if row['met'] else 'MISSED'}"
        )


def main() -> int:
    """Run from the command line; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="pairs per comparison (default %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MB), metavar="MB", help="default: 1 8 32")
    add_output_arguments(parser)
    options = parser.parse_args()
    if options.pairs < 1 or not all(1 <= size <= 64 for size in options.sizes):
        parser.error("--pairs must be at least 1, and each of --sizes from 1 to 64")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run(options.pairs, options.sizes))
    if options.json != "-":
        show(result)
    write_json(result, options.json)
    missed = [f"{row['name']} {row['size_mb']} MB" for row in result["comparisons"] if not row["met"]]
    return exit_code("objects", missed, options)


if __name__ == "__main__":
    sys.exit(main())
