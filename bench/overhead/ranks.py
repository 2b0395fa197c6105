"""One rank of the measured job: paired blocks of steps with and without a session, and our code timed by part."""

import os
import statistics
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from bench.harness.part_timer import CLOCKS, PartTimer
from bench.harness.rounds import Rounds, Timed, Timing
from torch.utils.data import DataLoader, TensorDataset

from dynamix.runtime.settings import BusSettings
from dynamix.trainer import Session
from dynamix.trainer.data.loader import Loader
from dynamix.trainer.data.sampler import PlanSampler
from dynamix.trainer.gradient import weighting
from dynamix.trainer.gradient.buckets import squared_norm
from dynamix.trainer.gradient.time_slots import TimeSlots
from dynamix.trainer.gradient.updates import Updates
from dynamix.trainer.gradient.weighting import GradientHook
from dynamix.trainer.steering.steering import Steering
from dynamix.trainer.steering.tracking import FastLoop

from .training import WINDOW_STEPS, Step, made_data, plain_arm, steered_arm

NUM_RANKS = 2
BLOCK_STEPS = 4
WARM_UP_BLOCKS = 2 * WINDOW_STEPS // BLOCK_STEPS
ON, OFF = "on", "off"

LAUNCH = "launch of the all-reduce"
WAIT = "wait for the all-reduce"
"""The hook of the last bucket waits, as DDP would right after it."""
TORCHS_LOADER = "torch's DataLoader"
NOT_OURS = (TORCHS_LOADER, WAIT)


class OverheadPlan(msgspec.Struct, frozen=True):
    """What to run."""

    num_pairs: int
    step_s: float
    hidden: int
    tracking: bool
    """Whether the actions ask for the fast loop: compute times on every all-reduce, a filter after every step."""


class RankTimings(msgspec.Struct, frozen=True):
    """What rank 0 measured."""

    on: list[Timing]
    """Blocks with the session."""
    off: list[Timing]
    here_s: dict[str, dict[str, float]]
    """Seconds per step on the training thread, by clock and part."""
    elsewhere_s: dict[str, dict[str, float]]
    """The same in other threads."""


def time_our_code() -> PartTimer:
    """Time everything of ours that a step runs through; call it before anything is attached."""
    timer = PartTimer()
    timer.wrap(GradientHook, GradientHook.reduce, "hook: weighing and the rest")
    timer.wrap(GradientHook, GradientHook.launch, LAUNCH)
    timer.wrap(Updates, Updates.before_step, "optimizer hooks")
    timer.wrap(Updates, Updates.after_step, "optimizer hooks")
    timer.wrap(Session, Session.step, "session.step")
    timer.wrap(weighting, squared_norm, "hook: norms")
    timer.wrap(GradientHook, GradientHook.wait, WAIT)
    timer.wrap(Steering, Steering.after_step, "session.step: end of a window")
    timer.wrap(TimeSlots, TimeSlots.extend, "hook: weighing, with times")
    timer.wrap(TimeSlots, TimeSlots.receive, "hook: times taken off")
    timer.wrap(FastLoop, FastLoop.observe_times, "session.step: filter and split")
    timer.wrap_iteration(Loader, "loader")
    timer.wrap_iteration(PlanSampler, "sampler")
    timer.wrap_iteration(DataLoader, TORCHS_LOADER)  # runs inside of our loader: taken off it
    return timer


def run_rank(rank: int, directory: str, plan: OverheadPlan, bus: BusSettings) -> None:
    """Run one rank of the job in this process; rank 0 writes what it measured."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=NUM_RANKS)
    measured = _measure(plan, bus, is_quiet=rank != 0)
    if rank == 0:
        Path(directory, "measured.json").write_bytes(msgspec.json.encode(measured))
    dist.barrier()
    dist.destroy_process_group()


def _measure(plan: OverheadPlan, bus: BusSettings, *, is_quiet: bool) -> RankTimings:
    """Both arms in rounds; after each round a block by one of the timer's clocks, in turn."""
    timer = time_our_code()
    data = made_data()
    pace_s = _agree_on_pace(data, plan)
    off, plain_model = plain_arm(data, plan.hidden, pace_s)
    on, session = steered_arm(data, plan.hidden, pace_s, bus)
    session.ignore(plain_model)

    def time_parts(number: int) -> None:
        timer.clock = list(CLOCKS)[number % len(CLOCKS)]
        _timed_block(on)
        timer.clock = None

    rounds = Rounds(
        *((ON, OFF), plan.num_pairs),
        label="blocks",
        num_warm_up=WARM_UP_BLOCKS,
        after_round=time_parts,
        is_quiet=is_quiet,
    )
    for arm in rounds:
        rounds.record(_timed_block(on if arm == ON else off))
    session.close()
    here, elsewhere = (
        {clock: _per_step(seconds, plan) for clock, seconds in timer.seconds(here=is_here).items()}
        for is_here in (True, False)
    )
    return RankTimings(rounds.timings[ON], rounds.timings[OFF], here, elsewhere)


def _timed_block(step: Step) -> Timing:
    """The cost of one block; both ranks begin together."""
    dist.barrier()
    with Timed(BLOCK_STEPS) as done:
        for _ in range(BLOCK_STEPS):
            step()
    return done.timing


def _agree_on_pace(data: TensorDataset, plan: OverheadPlan) -> float:
    """Seconds to sleep in each step so that a plain one takes `plan.step_s`: rank 0's."""
    unpaced, _ = plain_arm(data, plan.hidden, 0.0)
    taken_s = statistics.median(1 / _timed_block(unpaced).per_s for _ in range(WARM_UP_BLOCKS))
    pace = torch.tensor([max(plan.step_s - taken_s, 0.0)], dtype=torch.float64)
    dist.broadcast(pace, src=0)
    return pace.item()


def _per_step(seconds: dict[str, float], plan: OverheadPlan) -> dict[str, float]:
    """Seconds per step of our parts; each clock ran in every other block."""
    num_steps = plan.num_pairs // len(CLOCKS) * BLOCK_STEPS
    return {part: total / num_steps for part, total in sorted(seconds.items()) if part not in NOT_OURS}
