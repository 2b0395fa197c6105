"""The source's own check, small: `python -m bench.stigmergy.narrow [--alike] [--json FILE] [--agents 2,4,8]`.

Agents learn, each for itself, to fetch pellets through a passage one cell wide (`passage`, `learners`), with the traces
of all in the world and without them. With `--alike` they share what they learn, see whether an agent beside them
carries a pellet, and are rewarded as is reported of the source. Shown is what a trained team delivers in 200 steps, how
often two collide, how unevenly the work is divided, and how many of its agents stay idle; means over the seeds.
"""

import statistics
import sys

import msgspec
from bench.harness.command import BenchmarkError, BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.tables import formatted

from dynamix.lab.experiments.episodes.pool import EpisodePool

from .learners import TeamResult, train
from .passage import OURS, REPORTED

TUNNEL = 4
NUM_JUDGED = 50
COLUMNS = {
    "agents": "{num_agents}",
    "traces": "{traces}",
    "delivered": "{delivered:.1f}",
    "range": "{low:.1f}-{high:.1f}",
    "collisions": "{collisions:.1f}",
    "asymmetry": "{asymmetry:.2f}",
    "idle": "{idle:.2f}",
}


class TeamRun(msgspec.Struct, frozen=True, kw_only=True):
    """One team to train."""

    num_agents: int
    has_traces: bool
    num_episodes: int
    seed: int
    are_alike: bool

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.num_agents} agents {'with' if self.has_traces else 'without'} traces, seed {self.seed}"


class TeamRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    num_agents: int
    traces: str
    delivered: float
    low: float
    high: float
    collisions: float
    asymmetry: float
    idle: float


def result_of(run: TeamRun) -> TeamResult:
    """Train the team."""
    result = train(
        run.num_agents,
        tunnel=TUNNEL,
        has_traces=run.has_traces,
        num_episodes=run.num_episodes,
        num_judged=NUM_JUDGED,
        seed=run.seed,
        rules=REPORTED if run.are_alike else OURS,
        are_alike=run.are_alike,
    )
    sys.stderr.write(f"  {run.name}: {result.delivered:.1f} delivered\n")
    return result


def measure(agents: str, num_seeds: int, num_episodes: int, num_processes: int, *, are_alike: bool) -> BenchmarkReport:
    """All teams."""
    try:
        numbers = [int(each) for each in agents.split(",")]
    except ValueError:
        raise BenchmarkError(f"--agents {agents}: numbers with commas, such as 2,4,8") from None
    arms = [(number, has_traces) for number in numbers for has_traces in (True, False)]
    runs = [
        TeamRun(num_agents=number, has_traces=has_traces, num_episodes=num_episodes, seed=seed, are_alike=are_alike)
        for number, has_traces in arms
        for seed in range(num_seeds)
    ]
    with EpisodePool(num_processes) as pool:
        results = pool.run_all(result_of, runs)
    rows = [row_of(*arm, results[index * num_seeds : (index + 1) * num_seeds]) for index, arm in enumerate(arms)]
    return BenchmarkReport({"rows": rows}, formatted([msgspec.to_builtins(row) for row in rows], COLUMNS))


def row_of(num_agents: int, has_traces: bool, results: list[TeamResult]) -> TeamRow:
    """The means of an arm."""
    delivered = [each.delivered for each in results]
    return TeamRow(
        num_agents=num_agents,
        traces="yes" if has_traces else "no",
        delivered=statistics.fmean(delivered),
        low=min(delivered),
        high=max(delivered),
        collisions=statistics.fmean(each.collisions for each in results),
        asymmetry=statistics.fmean(each.asymmetry for each in results),
        idle=statistics.fmean(each.idle for each in results),
    )


def main() -> int:
    """Run, print, write."""
    parser = benchmark_parser(
        *("stigmergy.narrow", __doc__),
        ("--agents", "2,4,8", "sizes of the teams"),
        ("--seeds", 5, "teams of each size and kind"),
        ("--episodes", 2000, "of training, 200 steps each"),
        ("--processes", 1, "teams at a time"),
    )
    parser.add_argument("--alike", action="store_true", help="agents that share a table, with the reported rewards")
    options = parser.parse_args()
    return run_benchmark(
        *(
            "stigmergy.narrow",
            options,
            lambda: measure(
                options.agents, options.seeds, options.episodes, options.processes, are_alike=options.alike
            ),
        ),
        cannot=(ValueError,),
    )


if __name__ == "__main__":
    sys.exit(main())
