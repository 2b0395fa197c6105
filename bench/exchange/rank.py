"""One rank, on its host: `python -m bench.exchange.rank JSON`, with torch's variables in the environment.

It joins the others, says `ready`, and answers each case on its standard input with its timings on its standard output.
Bytes are those that the kernel counted at the interface of this rank's network namespace, headers and acknowledgements
included, from the barrier before an exchange to that behind it.
"""

import sys
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from bench.exchange.arms import arm_named, joined_pipeline
from bench.exchange.gradients import NUM_GRADIENTS, make_gradients
from bench.exchange.plan import ALL_REDUCE, Case, RankPlan
from bench.harness.rounds import Rounds, Timed, Timing
from torch import Tensor

from dynamix.collector.procfs.proc import parse_net_dev

P = TypeVar("P")
C = TypeVar("C")

NETWORK = Path("/proc/self/net/dev")
TIMEOUT = timedelta(seconds=300)


class ArmTimings(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of an arm; one value per round."""

    wall_s: list[float]
    cpu_s: list[float]
    """CPU time of the process, gloo's threads included."""
    tx_bytes: list[int]
    digest: int
    """Checksum of what the arm is judged by: the sum of the first gradient, or parameters after the last step."""
    error: float
    """Largest difference of this from the all-reduce's, over the largest number in that."""


def run_case(case: Case, plan: RankPlan) -> dict[str, ArmTimings]:
    """All arms, in rounds whose order is the same on all ranks."""
    gradients = make_gradients(case, plan, dist.get_rank())
    pipeline = joined_pipeline(TIMEOUT)
    prepares = {name: arm_named(name, case, plan, pipeline) for name in plan.arms}
    found = {name: prepare(gradients[0].clone())() for name, prepare in prepares.items()}
    sums = {name: _dense(total) for name, total in found.items()}
    largest = sums[ALL_REDUCE].abs().max()
    errors = {name: float((total - sums[ALL_REDUCE]).abs().max() / largest) for name, total in sums.items()}
    digests = {name: zlib.crc32(total.numpy().tobytes()) for name, total in sums.items()}
    del found, sums
    rounds = Rounds(plan.arms, plan.num_rounds, label="exchange", num_warm_up=plan.num_warm_up - 1, is_quiet=True)
    num_done = dict.fromkeys(plan.arms, 1)
    for name in rounds:
        exchange = prepares[name](gradients[num_done[name] % NUM_GRADIENTS].clone())
        num_done[name] += 1
        rounds.record(timed(exchange))
    pipeline.close()
    return {
        name: ArmTimings(
            wall_s=[timing.wall_s for timing in timings],
            cpu_s=[timing.cpu_s for timing in timings],
            tx_bytes=[timing.num_bytes for timing in timings],
            digest=digests[name],
            error=errors[name],
        )
        for name, timings in rounds.timings.items()
    }


def timed(work: Callable[[], object], num_items: float = 1.0) -> Timing:
    """Time what all ranks do together, with the bytes that this one sends."""
    dist.barrier()
    before, _ = parse_net_dev(NETWORK.read_text())
    with Timed(num_items) as clock:
        work()
    dist.barrier()
    after, _ = parse_net_dev(NETWORK.read_text())
    return clock.timing._replace(num_bytes=after - before)


def _dense(total: Tensor) -> Tensor:
    return (total.to_dense() if total.is_sparse else total).flatten()


def answer_cases(argument: str, plan_type: type[P], case_type: type[C], run: Callable[[C, P], object]) -> None:
    """Join the others and answer cases until standard input ends."""
    plan = msgspec.json.decode(argument, type=plan_type)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        found = run(msgspec.json.decode(line, type=case_type), plan)
        sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    answer_cases(sys.argv[1], RankPlan, Case, run_case)
