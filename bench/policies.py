"""What a decision costs: `python -m bench.policies [--json FILE] [--repeats N]`, some seconds.

Each policy decides for jobs of 8 to 10,000 ranks of mixed speed, each time with the carry of its previous decision. The
arbitrator decides the jobs of all its users in one event loop: a decision must take milliseconds, also for the largest.
CPU time of the deciding thread, so that other work on the machine does not count; judged by the median at 10,000 ranks.
The learned ones are networks of the usual size with random weights, which cost what trained ones do.
"""

import statistics
import sys
import time
from typing import Any

import numpy as np
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.tables import aligned
from bench.messages.load import job_of

from dynamix.arbitrator.learned.actions import ActionSetName
from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile, PolicyMetadata
from dynamix.arbitrator.learned.ppo_settings import PPOSettings
from dynamix.arbitrator.policies.model.observation import Array32
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.networks import forward

WORLD_SIZES = (8, 128, 1024, 10_000)
TARGET_MS = 20.0
TARGET_PER_RANK_MS = 40.0
"""The target of a policy that evaluates its network once for each rank."""
LOCAL_BATCH_SIZE = 64
LEARNED: dict[str, ActionSetName] = {"ppo": "global", "ppo-paper": "deltas"}


def main() -> int:
    """Measure, print a table, write JSON; 1 when a policy misses the target."""
    parser = benchmark_parser("policies", __doc__, ("--repeats", 20, "decisions timed per policy and size"))
    options = parser.parse_args()
    return run_benchmark("policies", options, lambda: measure(options.repeats))


def measure(num_repeats: int) -> BenchmarkReport:
    """Time all policies for all sizes of job."""
    policies = [*POLICIES.values(), *(learned(name, action_set) for name, action_set in LEARNED.items())]
    rows = [time_decisions(policy, size, num_repeats) for policy in policies for size in WORLD_SIZES]
    targets = [
        Target(name=f"{row['policy']}, ms", value=row["median_ms"], at_most=row["target_ms"])
        for row in rows
        if row["world_size"] == WORLD_SIZES[-1]
    ]
    return BenchmarkReport({"decisions": rows}, table_of(rows), targets)


def learned(name: str, action_set: ActionSetName) -> LearnedPolicy:
    """A policy of this name that learned nothing."""
    sizes = PPOSettings().hidden_sizes
    metadata = PolicyMetadata.of(
        action_set=action_set, policy=name, algorithm="clipped", hidden_sizes=sizes, reward_formula="auto"
    )
    shapes, rng = forward.network_shapes(len(metadata.inputs), sizes, len(metadata.actions)), np.random.default_rng(0)
    file = PolicyFile(metadata, {name: rng.random(shape, dtype=np.float32) for name, shape in shapes.items()})
    return LearnedPolicy(PolicyFile.from_bytes(file.to_bytes()))


def time_decisions(policy: Policy, world_size: int, repeats: int) -> dict[str, Any]:
    """Time decisions of one policy for one size of job, after two that are not counted."""
    job = job_of(
        *("bench-0a1b2c3d", world_size, policy.name),
        window_steps=10,
        initial_local_batch_sizes=(LOCAL_BATCH_SIZE,) * world_size,
        base_global_batch_size=LOCAL_BATCH_SIZE * world_size,
        min_local_batch_size=8,
    )
    rates = np.resize(np.array([4000.0, 2000.0, 1000.0, 500.0]), world_size)
    rng = np.random.default_rng(0)
    sizes, carry, times_s = job.initial_local_batch_sizes, b"", []
    for window in range(repeats + 2):
        obs_WF, global_F = _observe(sizes, rates, job.window_steps, rng)
        begun = time.thread_time()
        decision = policy.decide(job, window, obs_WF, global_F, carry)
        times_s.append(time.thread_time() - begun)
        sizes, carry = decision.allocation.local_batch_sizes, decision.carry
    timed_ms = sorted(1e3 * time_s for time_s in times_s[2:])
    return {
        "policy": policy.name,
        "world_size": world_size,
        "num_decisions": repeats,
        "median_ms": statistics.median(timed_ms),
        "least_ms": timed_ms[0],
        "most_ms": timed_ms[-1],
        "target_ms": TARGET_PER_RANK_MS if LEARNED.get(policy.name) == "deltas" else TARGET_MS,
        "carry_bytes": len(carry),
    }


def table_of(rows: list[dict[str, Any]]) -> str:
    """One line per policy, one column per size."""
    policies = [rows[start : start + len(WORLD_SIZES)] for start in range(0, len(rows), len(WORLD_SIZES))]
    cells = [
        [found[0]["policy"], *(f"{row['median_ms']:.2f}" for row in found), f"{found[-1]['carry_bytes']:,}"]
        for found in policies
    ]
    return aligned(["median CPU ms", *(f"{size:,}" for size in WORLD_SIZES), "carry"], cells)


def _observe(
    sizes: tuple[int, ...], rates: np.ndarray[Any, Any], steps: int, rng: np.random.Generator
) -> tuple[Array32, Array32]:
    """A window with 5 % noise on every time, and a noise scale that grows and shrinks."""
    compute_s = (0.002 + np.array(sizes) / rates) * (1 + 0.05 * rng.standard_normal(len(sizes)))
    step_s = compute_s.max() + 0.010
    obs_WF = np.zeros((len(sizes), len(RANK_FEATURES)), dtype=np.float32)
    obs_WF[:, RANK_INDEX["num_samples"]] = np.array(sizes) * steps
    obs_WF[:, RANK_INDEX["compute_time_s"]] = compute_s
    obs_WF[:, RANK_INDEX["sync_time_s"]] = step_s - compute_s
    obs_WF[:, RANK_INDEX["step_time_s"]] = step_s
    obs_WF[:, RANK_INDEX["decided_local_batch_size"]] = sizes
    global_F = np.zeros(len(GLOBAL_FEATURES), dtype=np.float32)
    global_F[GLOBAL_INDEX["noise_scale"]] = sum(sizes) * rng.uniform(0.5, 2.0)
    global_F[GLOBAL_INDEX["loss"]] = rng.uniform(0.4, 0.6)
    global_F[GLOBAL_INDEX["step_time_s"]] = step_s
    global_F[GLOBAL_INDEX["throughput"]] = sum(sizes) / step_s
    return obs_WF, global_F


if __name__ == "__main__":
    sys.exit(main())
