"""What codecs cost a rank: `python -m bench.coding [--json FILE] [--repeats N]`, a minute.

Every codec sums the gradients of 4 and of 8 ranks, in one process and without a network, in buckets of 1 and 4 MB that
are one matrix each. For `rows` and `sketch` the matrix has rows of 64 numbers, of which 5 % are not zero, other ones on
each rank. CPU time of coding and decoding per rank, so that other work on the machine hardly counts: that of the
process but for what stands in for the network. Beside it what the defaults of `[coding]` say (scenarios/README.md).
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from bench.harness.command import BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.tables import aligned

from dynamix.lab.simulator.exchange.traffic import run_counted
from dynamix.lab.simulator.scenario import Coding
from dynamix.trainer.exchange.codec import BucketPart, BucketView, Member
from dynamix.trainer.exchange.collectives import Leg, perform_alike
from dynamix.trainer.exchange.registry import CODECS

WORLD_SIZES = (4, 8)
SIDES = (512, 1024)
"""Rows and columns of the matrices, of float32: 1 and 4 MB."""
SPARSE = ("rows", "sketch")
ROW_NUMBERS, DENSITY = 64, 0.05
NUM_WARM_UP = 3


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = benchmark_parser("coding", __doc__, ("--repeats", 20, "sums timed for each row of the table"))
    options = parser.parse_args()
    return run_benchmark("coding", options, lambda: measure(options.repeats))


def measure(num_repeats: int) -> BenchmarkReport:
    """Time every codec."""
    torch.set_num_threads(1)
    rows = [
        time_codec(codec, side, world_size, num_repeats)
        for codec in CODECS
        for side in SIDES
        for world_size in WORLD_SIZES
    ]
    return BenchmarkReport({"codecs": rows}, table_of(rows))


def time_codec(name: str, side: int, world_size: int, num_repeats: int) -> dict[str, Any]:
    """CPU time that one rank takes for a bucket, and what `[coding]` says of it."""
    columns = ROW_NUMBERS if name in SPARSE else side
    parts = (BucketPart("weight", 0, side * side, torch.Size((side * side // columns, columns))),)
    codecs = [CODECS[name]() for _ in range(world_size)]
    shares = (1.0,) * world_size if name == "none" else ()
    members = [Member(rank, world_size, shares) for rank in range(world_size)]
    generator, times_s, num_messages = torch.Generator().manual_seed(0), [], 0
    for number in range(NUM_WARM_UP + num_repeats):
        views = [BucketView(0, _gradient(parts[0], generator, is_sparse=name in SPARSE), parts) for _ in members]
        legs = [codec.reduce(view, member) for codec, view, member in zip(codecs, views, members, strict=True)]
        if number == 0:
            num_messages = sum(each.num_messages for each in run_counted(legs))
        else:
            times_s.append(coding_s(legs) / world_size)
    num_bytes, says = views[0].flat.nbytes, Coding()
    says_s = says.s_per_byte(name) * num_bytes + says.message_s * num_messages
    measured_s = statistics.median(times_s[NUM_WARM_UP - 1 :])
    return {
        "codec": name,
        "num_bytes": num_bytes,
        "world_size": world_size,
        "num_messages": num_messages,
        "median_ms": 1e3 * measured_s,
        "says_ms": 1e3 * says_s,
        "s_per_million_bytes": 1e6 * (measured_s - says.message_s * num_messages) / num_bytes,
    }


def coding_s(legs: Sequence[Leg]) -> float:
    """CPU time of the legs of all ranks, threads that they start included, and without the collectives."""
    begun, performed_s = time.process_time(), 0.0
    while asked := [each for leg in legs if (each := next(leg, None)) is not None]:
        collective = time.thread_time()
        perform_alike(asked)
        performed_s += time.thread_time() - collective
    return time.process_time() - begun - performed_s


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """One line per codec, size and number of ranks."""
    cells = [
        [
            row["codec"],
            f"{row['num_bytes'] / 2**20:.0f}",
            str(row["world_size"]),
            f"{row['median_ms']:.2f}",
            f"{row['says_ms']:.2f}",
            f"{row['s_per_million_bytes']:.4f}",
        ]
        for row in rows
    ]
    return aligned(["codec", "MB", "ranks", "CPU ms per rank", "[coding] says", "s per million bytes"], cells)


def _gradient(part: BucketPart, generator: torch.Generator, *, is_sparse: bool) -> torch.Tensor:
    gradient = torch.randn(part.shape, generator=generator)
    if is_sparse:
        gradient *= torch.rand(part.shape[0], 1, generator=generator) < DENSITY
        gradient += 0.0  # no -0.0
    return gradient.flatten()


if __name__ == "__main__":
    sys.exit(main())
