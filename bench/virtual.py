"""How fast a virtual cluster trains: `python -m bench.virtual [--json FILE] [--pairs N]`, about half a minute.

Fashion-MNIST's 14 x 14 perceptron on made-up images, 8 workers x 64 samples, SGD with momentum, one thread. Each arm is
run in turn with plain PyTorch training of the same model on the same 512 samples per step (ABBA), and judged by the
median of the pairs' ratios of CPU time, which a busy machine does not change much. Targets are steps per second of CPU
time of one core.

every step    the cluster alone; per-worker gradient norms on every step
every 4th     norms on every fourth step
steered       as the first, with collector, reward and arbitrator as functions under the policy `proportional`, which
              keeps the global batch
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from bench.output import add_output_arguments, exit_code, write_json
from torch import nn

from dynamix.arbitrator.policies import policy_named
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

Arm = Callable[[int], None]


class Sample(NamedTuple):
    """One run of one arm, in steps per second."""

    per_s: float
    per_cpu_s: float


class Comparison(NamedTuple):
    """One row of the result."""

    name: str
    ours: Arm
    target: float | None


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
    """The training loop that anybody would write, on indices drawn once per epoch."""

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
    """The cluster without anybody who decides."""

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


def measure(arm: Arm, num_steps: int) -> Sample:
    """Run an arm once; setting it up counts, too."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    arm(num_steps)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return Sample(num_steps / wall_s, num_steps / cpu_s)


def compare(comparison: Comparison, raw: Arm, *, num_pairs: int, num_steps: int) -> dict[str, Any]:
    """Pairs of ours and plain, in alternating order; the first one warms up."""
    ours_all: list[Sample] = []
    raw_all: list[Sample] = []
    for pair in range(-1, num_pairs):
        arms = [(ours_all, comparison.ours), (raw_all, raw)]
        for samples, arm in arms if pair % 2 else reversed(arms):
            sample = measure(arm, num_steps)
            if pair >= 0:
                samples.append(sample)
        print(f"\r{comparison.name}: pair {pair + 1} of {num_pairs}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return summary(comparison, ours_all, raw_all)


def summary(comparison: Comparison, ours: list[Sample], raw: list[Sample]) -> dict[str, Any]:
    """Medians and spread of one comparison."""
    ratios = sorted(our.per_cpu_s / their.per_cpu_s for our, their in zip(ours, raw, strict=True))
    steps_per_cpu_s = statistics.median(sample.per_cpu_s for sample in ours)
    return {
        "name": comparison.name,
        "num_pairs": len(ratios),
        "steps_per_s": statistics.median(sample.per_s for sample in ours),
        "steps_per_cpu_s": steps_per_cpu_s,
        "plain_steps_per_s": statistics.median(sample.per_s for sample in raw),
        "plain_steps_per_cpu_s": statistics.median(sample.per_cpu_s for sample in raw),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "target": comparison.target,
        "met": comparison.target is None or steps_per_cpu_s >= comparison.target,
    }


def run(num_pairs: int, num_steps: int) -> dict[str, Any]:
    """All comparisons."""
    torch.set_num_threads(1)
    data = made_data()
    raw = plain(data)
    comparisons = (
        Comparison("every step", alone(data, 1), TARGET_STEPS_PER_S),
        Comparison("every 4th", alone(data, 4), None),
        Comparison("steered", steered(data), TARGET_STEPS_PER_S),
    )
    rows = [compare(each, raw, num_pairs=num_pairs, num_steps=num_steps) for each in comparisons]
    sizes = {"num_workers": NUM_WORKERS, "local_batch_size": LOCAL_BATCH_SIZE}
    return {"workload": WORKLOAD, **sizes, "num_steps": num_steps, "comparisons": rows}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"\n{result['workload']}, {result['num_workers']} workers x {result['local_batch_size']}, "
        f"{result['num_steps']} steps a run; steps per second"
    )
    print(f"{'':<12}{'ours':>7}{'plain':>7}{'ours/CPU':>10}{'plain/CPU':>11}{'ratio':>7}  {'range':<12} target")
    for row in result["comparisons"]:
        spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
        target = "-" if row["target"] is None else f">= {row['target']:.0f} {'met' if row['met'] else 'MISSED'}"
        print(
            f"{row['name']:<12}{row['steps_per_s']:>7.0f}{row['plain_steps_per_s']:>7.0f}{row['steps_per_cpu_s']:>10.0f}"
            f"{row['plain_steps_per_cpu_s']:>11.0f}{row['ratio']:>7.2f}  {spread:<12} {target}"
        )


def main() -> int:
    """Run from the command line; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="pairs per comparison (default 7)")
    parser.add_argument("--steps", type=int, default=500, help="steps per run (default 500)")
    add_output_arguments(parser)
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < 1:
        parser.error("--pairs and --steps must be at least 1")
    result = run(options.pairs, options.steps)
    if options.json != "-":
        show(result)
    write_json(result, options.json)
    missed = [row["name"] for row in result["comparisons"] if not row["met"]]
    return exit_code("virtual", missed, options)


if __name__ == "__main__":
    sys.exit(main())
