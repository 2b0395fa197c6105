"""How fast a virtual cluster trains: `python -m bench.virtual [--json FILE] [--pairs N]`, about half a minute.

Fashion-MNIST's 14 x 14 perceptron on made-up images, 8 workers x 64 samples, SGD with momentum, one thread. Each arm is
run in pairs with plain PyTorch training of the same model on the same 512 samples per step; ratios are of CPU time,
which a busy machine does not change much. Targets are steps per second of CPU time of one core.

every step    the cluster alone; per-worker gradient norms on every step
every 4th     norms on every fourth step
steered       as the first, with collector, reward and arbitrator as functions under the policy `proportional`, which
              keeps the global batch
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from bench.harness.command import BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.rounds import Rounds, Timed
from bench.harness.tables import formatted
from torch import nn

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.experiments.episodes.episode import ControlPlane
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.scenario import Network, Scenario, Stragglers, Workers
from dynamix.lab.workloads import Data, Part, make_optimizer, workload_named
from dynamix.reward.formula import Weights

WORKLOAD = "fashion-14-mlp"
NUM_WORKERS = 8
LOCAL_BATCH_SIZE = 64
NUM_SAMPLES = 50_000
TARGET_STEPS_PER_S = 350.0
FAR_S = 1e9
COLUMNS = {
    "": "{name}",
    "ours": "{steps_per_s:.0f}",
    "plain": "{plain_steps_per_s:.0f}",
    "ours/CPU": "{steps_per_cpu_s:.0f}",
    "plain/CPU": "{plain_steps_per_cpu_s:.0f}",
    "ratio": "{ratio:.2f}",
    "range": "{ratio_min:.2f}-{ratio_max:.2f}",
}

Arm = Callable[[int], None]


def made_data() -> Data:
    """Images of noise: what they show does not change what a step costs."""
    generator = torch.Generator().manual_seed(1)

    def part(count: int) -> Part:
        images = torch.randn(count, 1, 14, 14, generator=generator)
        return Part(images, torch.randint(0, 10, (count,), generator=generator))

    return Data(part(NUM_SAMPLES), part(1000), part(1000))


def scenario(noise_every: int) -> Scenario:
    """Equal workers that jitter and straggle, and a run without end or evaluation."""
    return Scenario(
        name="bench",
        family="bench",
        workload=WORKLOAD,
        workers=(Workers(count=NUM_WORKERS, samples_per_s=4000.0, overhead_s=0.002),),
        target_accuracy=1.0,
        fixed_time_s=FAR_S,
        time_limit_s=FAR_S,
        evaluate_every_s=FAR_S,
        noise_every=noise_every,
        initial_local_batch_size=LOCAL_BATCH_SIZE,
        network=Network(gradient_bytes=8_000_000),
        stragglers=Stragglers(factor=2.0, mean_normal_s=10.0, mean_slow_s=2.0, jitter=0.05),
    )


def plain(data: Data) -> Arm:
    """A plain PyTorch training loop, on indices drawn once per epoch."""

    def train(num_steps: int) -> None:
        torch.manual_seed(0)
        workload = workload_named(WORKLOAD)
        model, criterion = workload.model(), nn.CrossEntropyLoss()
        optimizer = make_optimizer("sgd", model.parameters(), 0.05)
        total = NUM_WORKERS * LOCAL_BATCH_SIZE
        for step in range(num_steps):
            start = step * total % NUM_SAMPLES
            if step == 0 or start < total:
                order = torch.randperm(NUM_SAMPLES)
            batch = order[start : start + total]
            optimizer.zero_grad()
            criterion(model(data.train.inputs[batch]), data.train.labels[batch]).backward()
            optimizer.step()

    return train


def alone(data: Data, noise_every: int) -> Arm:
    """The cluster without decisions."""

    def train(num_steps: int) -> None:
        cluster = VirtualCluster(scenario(noise_every), data, seed=0, policy="static")
        while cluster.position.step < num_steps:
            cluster.run_window()

    return train


def steered(data: Data) -> Arm:
    """The cluster under a policy that keeps the global batch."""

    def train(num_steps: int) -> None:
        cluster = VirtualCluster(scenario(1), data, seed=0, policy="proportional")
        control = ControlPlane(cluster.job, policy_named("proportional"), reward=(None, Weights()))
        while cluster.position.step < num_steps:
            for action in control.of_window(cluster.run_window())[1]:
                cluster.offer(action)

    return train


def compare(name: str, arm: Arm, raw: Arm, *, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """One row: pairs of ours and plain training; setting a run up counts, too."""
    rounds = Rounds(("ours", "plain"), num_pairs, label=name)
    for which in rounds:
        with Timed(num_steps) as done:
            (arm if which == "ours" else raw)(num_steps)
        rounds.record(done.timing)
    per_s, per_cpu_s = rounds.medians("per_s"), rounds.medians("per_cpu_s")
    return {
        "name": name,
        "steps_per_s": per_s["ours"],
        "steps_per_cpu_s": per_cpu_s["ours"],
        "plain_steps_per_s": per_s["plain"],
        "plain_steps_per_cpu_s": per_cpu_s["plain"],
        **rounds.ratios("per_cpu_s"),
    }


def measure(num_pairs: int, num_steps: int) -> BenchmarkReport:
    """All comparisons."""
    torch.set_num_threads(1)
    data = made_data()
    raw = plain(data)
    rows = [
        compare(name, arm, raw, num_pairs=num_pairs, num_steps=num_steps) | {"target": target}
        for name, arm, target in (
            ("every step", alone(data, 1), TARGET_STEPS_PER_S),
            ("every 4th", alone(data, 4), None),
            ("steered", steered(data), TARGET_STEPS_PER_S),
        )
    ]
    title = f"{WORKLOAD}, {NUM_WORKERS} workers x {LOCAL_BATCH_SIZE}, {num_steps} steps a run; steps per second\n"
    sizes = {"num_workers": NUM_WORKERS, "local_batch_size": LOCAL_BATCH_SIZE, "num_steps": num_steps}
    targets = [
        Target(name=f"{row['name']}, steps per CPU second", value=row["steps_per_cpu_s"], at_least=row["target"])
        for row in rows
        if row["target"]
    ]
    return BenchmarkReport(
        {"workload": WORKLOAD, **sizes, "comparisons": rows}, title + formatted(rows, COLUMNS), targets
    )


def main() -> int:
    """Run from the command line; exit code 1 when a target is missed."""
    parser = benchmark_parser(
        "virtual", __doc__, ("--pairs", 7, "pairs per comparison"), ("--steps", 500, "steps per run")
    )
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < 1:
        parser.error("--pairs and --steps must be at least 1")
    return run_benchmark("virtual", options, lambda: measure(options.pairs, options.steps))


if __name__ == "__main__":
    sys.exit(main())
