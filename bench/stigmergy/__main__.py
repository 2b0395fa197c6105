"""Control without a centre beside central policies: `python -m bench.stigmergy [--json FILE] [--workers 8,32]`.

Virtual clusters with the speeds of the train scenario n128 (3000, 1500, 1500 and 700 samples/s), one worker per node up
to 128 workers and eight beyond, with and without workers that slow down by 2.5 now and then. Shown is the virtual time
to the target over that of `rule` on the same seeds (geometric mean; a miss counts as the time limit), how many runs
missed, and what steering publishes per window besides the reports, in messages and bytes. Arms with a cross go on
without: `rule x arbitrator` without any action from window 10 on, `stigmergy x half` without the agents of every second
node. (Without an arbitrator `stigmergy` is the same to the bit: tests/lab/test_stigmergy.py.) The agents of `stigmergy
learned` have the network that comes with the package.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from bench.harness.command import BenchmarkError, BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.tables import formatted

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile, shipped_policy
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.experiments.episodes.episode import run_episode
from dynamix.lab.experiments.episodes.pool import EpisodePool, workload_data
from dynamix.lab.experiments.episodes.suite import TRAIN, suite_named
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.scenario import Scenario

from .clusters import WithHalfOfTheAgents, WithoutArbitrator, scaled, traffic

BASE = "n128"
REFERENCE = "rule"
MANY = 128
"""Beyond so many workers a node has `RANKS_PER_NODE`, up to it one."""
RANKS_PER_NODE = 8
COLUMNS = {
    "workers": "{num_workers}",
    "stragglers": "{stragglers}",
    "": "{arm}",
    "time/rule": "{ratio:.2f}",
    "range": "{low:.2f}-{high:.2f}",
    "median s": "{median_s:.2f}",
    "missed": "{num_missed}",
    "messages": "{num_messages:.0f}",
    "bytes": "{num_bytes:.0f}",
}


class SteeringArm(NamedTuple):
    """A row: a policy, and the cluster in which something may die."""

    name: str
    policy: str
    cluster: type[VirtualCluster] = VirtualCluster
    options: Mapping[str, float] = {}


ARMS = (
    SteeringArm("static", "static"),
    SteeringArm("proportional", "proportional"),
    SteeringArm(REFERENCE, "rule"),
    SteeringArm("rule x arbitrator", "rule", WithoutArbitrator),
    SteeringArm("ppo", "ppo"),
    SteeringArm("stigmergy", "stigmergy"),
    SteeringArm("stigmergy learned", "stigmergy", options={"learned": 1.0}),
    SteeringArm("stigmergy x half", "stigmergy", WithHalfOfTheAgents),
)


class ArmRun(msgspec.Struct, frozen=True, kw_only=True):
    """One episode of an arm."""

    arm: int
    scenario: Scenario
    seed: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{ARMS[self.arm].name}, {self.scenario.world_size} workers, seed {self.seed}"


class ArmTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    num_workers: int
    stragglers: str
    arm: str
    ratio: float
    low: float
    high: float
    median_s: float
    num_missed: int
    num_messages: float
    num_bytes: float


def policy_of(name: str) -> Policy:
    """The policy that is code or a file of the package."""
    file = shipped_policy(name)
    return policy_named(name) if file is None else LearnedPolicy(PolicyFile.from_bytes(file))


def time_of(run: ArmRun) -> float | None:
    """Virtual seconds to the target; `None` for a miss."""
    arm, data = ARMS[run.arm], workload_data(run.scenario.workload, None)
    episode = run_episode(
        run.scenario,
        policy_of(arm.policy),
        data=data,
        seed=run.seed,
        policy_options=arm.options,
        make_cluster=arm.cluster,
    )
    sys.stderr.write(f"  {run.name}: {episode.time_to_target_s}\n")
    return episode.time_to_target_s


def chosen_arms(names: str) -> list[int]:
    """Places of the arms in `ARMS`; all of them for an empty text.

    Raises:
        BenchmarkError: when there is no arm of a name, or none to compare with.
    """
    known = [arm.name for arm in ARMS]
    chosen = names.split(",") if names else known
    if unknown := [name for name in chosen if name not in known]:
        raise BenchmarkError(f"--arms {unknown[0]!r}: there are {', '.join(known)}")
    if REFERENCE not in chosen:
        raise BenchmarkError(f"--arms {names}: times are over those of {REFERENCE!r}, which must be among them")
    return [known.index(name) for name in chosen]


def rows_of(scenario: Scenario, label: str, arms: Sequence[int], num_seeds: int, pool: EpisodePool) -> list[ArmTimes]:
    """The arms on one cluster."""
    runs = [ArmRun(arm=index, scenario=scenario, seed=seed) for index in arms for seed in range(num_seeds)]
    times = pool.run_all(time_of, runs)
    data = workload_data(scenario.workload, None)
    by_arm = [times[at : at + num_seeds] for at in range(0, len(times), num_seeds)]
    counted = [[scenario.time_limit_s if time is None else time for time in each] for each in by_arm]
    reference = counted[[ARMS[index].name for index in arms].index(REFERENCE)]
    rows = []
    for arm, each, found in zip([ARMS[index] for index in arms], counted, by_arm, strict=True):
        ratios = [mine / theirs for mine, theirs in zip(each, reference, strict=True)]
        sent = traffic(scenario, policy_of(arm.policy), data, options=arm.options)
        rows.append(
            ArmTimes(
                num_workers=scenario.world_size,
                stragglers=label,
                arm=arm.name,
                ratio=math.exp(statistics.fmean(map(math.log, ratios))),
                low=min(ratios),
                high=max(ratios),
                median_s=statistics.median(each),
                num_missed=found.count(None),
                num_messages=sent.num_messages,
                num_bytes=sent.num_bytes,
            )
        )
    return rows


def measure(workers: str, arms: str, num_seeds: int, num_processes: int) -> BenchmarkReport:
    """All clusters, one after the other."""
    chosen = chosen_arms(arms)
    try:
        numbers = [int(each) for each in workers.split(",")]
    except ValueError:
        raise BenchmarkError(f"--workers {workers}: numbers with commas, such as 8,32,128") from None
    base = next(each for each in suite_named(TRAIN).scenarios if each.name == BASE)
    rows: list[ArmTimes] = []
    with EpisodePool(num_processes) as pool:
        for number in numbers:
            for label, has_stragglers in (("no", False), ("yes", True)):
                ranks_per_node = 1 if number <= MANY else RANKS_PER_NODE
                scenario = scaled(base, number, ranks_per_node, has_stragglers=has_stragglers)
                rows += rows_of(scenario, label, chosen, num_seeds, pool)
    return BenchmarkReport({"rows": rows}, formatted([msgspec.to_builtins(row) for row in rows], COLUMNS))


def main() -> int:
    """Run, print, write."""
    parser = benchmark_parser(
        *("stigmergy", __doc__),
        ("--workers", "8,32,128", "numbers of workers, each a multiple of 4"),
        ("--arms", "", "rows, with commas; all without"),
        ("--seeds", 5, "runs of each arm"),
        ("--processes", 1, "episodes at a time"),
    )
    options = parser.parse_args()
    return run_benchmark(
        *("stigmergy", options, lambda: measure(options.workers, options.arms, options.seeds, options.processes)),
        cannot=(ValueError, OSError),
    )


if __name__ == "__main__":
    sys.exit(main())
