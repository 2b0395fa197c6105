"""What reading and writing whole files costs beside nats-py: `python -m bench.objects [--json FILE] [--pairs N]`.

About a minute, nearly all of it nats-py's. One broker, one process, uvloop, random bytes. Each comparison runs ours and
nats-py's own object store in pairs on the same bucket and is judged by the median of the pairs' ratios. Both write the
same layout, check the same digest and wait for acknowledgements.

put  `Bus.objects.put` against `ObjectStore.put`, each time under a new name, which is deleted after the measurement.
get  `Bus.objects.get` against `ObjectStore.get` of the same stored object.
"""

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

from bench.harness.broker import broker_with_bus, raw_client, run_with_uvloop
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.rounds import Rounds, Timed, Timing
from bench.harness.tables import formatted
from nats.js.object_store import ObjectStore

from dynamix.runtime.bus import Bus
from dynamix.schemas.streams import POLICIES

SIZES_MB = (1, 8, 32)
MB = 1 << 20
TARGET = 1.0
"""Ours must never be slower."""
OURS, THEIRS = "ours", "nats_py"
COLUMNS = {
    "": "{name} {size_mb} MB",
    "ours MB/s": "{ours_mb_per_s:.0f}",
    "nats-py MB/s": "{nats_py_mb_per_s:.0f}",
    "ratio": "{ratio:.2f}",
    "range": "{ratio_min:.2f}-{ratio_max:.2f}",
}


class ObjectArms:
    """The arms, over one bucket."""

    def __init__(self, bus: Bus, theirs: ObjectStore) -> None:
        self._bus = bus
        self._theirs = theirs
        self._names = (f"object-{number}" for number in itertools.count())

    async def put(self, arm: str, data: bytes) -> Timing:
        """Write under a new name."""
        name = next(self._names)
        with Timed(len(data) / MB) as done:
            if arm == OURS:
                await self._bus.objects.put(POLICIES.bucket, name, data)
            else:
                await self._theirs.put(name, data)
        await self._bus.objects.delete(POLICIES.bucket, name)
        return done.timing

    async def get(self, arm: str, data: bytes) -> Timing:
        """Read what is stored."""
        with Timed(len(data) / MB) as done:
            if arm == OURS:
                found = (await self._bus.objects.get(POLICIES.bucket, "stored")).data
            else:
                found = (await self._theirs.get("stored")).data or b""
        assert found == data, "what was read is what was stored"
        return done.timing

    async def compare(self, name: str, size_mb: int, data: bytes, num_pairs: int) -> dict[str, Any]:
        """Pairs of ours and theirs; a ratio above 1 says that ours is faster."""
        rounds = Rounds((OURS, THEIRS), num_pairs, label=f"{name} {size_mb} MB")
        for arm in rounds:
            rounds.record(await (self.put if name == "put" else self.get)(arm, data))
        medians = {f"{arm}_mb_per_s": median for arm, median in rounds.medians("per_s").items()}
        return {"name": name, "size_mb": size_mb, "target": TARGET} | medians | rounds.ratios("per_s")


async def measure(num_pairs: int, sizes_mb: Sequence[int]) -> BenchmarkReport:
    """All comparisons over one broker."""
    async with broker_with_bus("bench") as (server, bus), raw_client(server.settings) as client:
        arms = ObjectArms(bus, await client.jetstream().object_store(POLICIES.bucket))
        rows = []
        for size_mb in sizes_mb:
            data = os.urandom(size_mb * MB)
            await bus.objects.put(POLICIES.bucket, "stored", data)
            rows += [await arms.compare(name, size_mb, data, num_pairs) for name in ("put", "get")]
        retries = bus.counters["retries"]
    targets = [
        Target(name=f"{row['name']} {row['size_mb']} MB, ratio", value=row["ratio"], at_least=TARGET) for row in rows
    ]
    return BenchmarkReport(
        {"retries": retries, "comparisons": rows}, f"{retries} retries\n{formatted(rows, COLUMNS)}", targets
    )


def main() -> int:
    """Run from the command line; exit code 1 when a target is missed."""
    parser = benchmark_parser("objects", __doc__, ("--pairs", 5, "pairs per comparison"))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MB, metavar="MB", help="(default: 1 8 32)")
    options = parser.parse_args()
    if options.pairs < 1 or not all(1 <= size <= 64 for size in options.sizes):
        parser.error("--pairs must be at least 1, and each of --sizes from 1 to 64")
    return run_benchmark("objects", options, lambda: run_with_uvloop(measure(options.pairs, options.sizes)))


if __name__ == "__main__":
    sys.exit(main())
