"""The paper's models at their own size: static 32, 64 and 128 and the default policy, on 8 mixed workers."""

import math
from typing import Any

import msgspec

from dynamix.lab.simulator.scenario import Network, Scenario

from .baselines import STATICS
from .laboratory import Laboratory
from .result import BASE, COLUMNS, ExperimentResult, accuracy_panel, rows_of

REFERENCE_SEED = 100
"""Seed of the run that sets a target: no row is run under it."""
CIFAR10_SAMPLES = 1000
"""Validation images that accuracy is looked up on: all 5,000 would cost a core as much as training VGG11."""
VGG11_LEARNING_RATE = 0.04
"""For a global batch of 512. It has no norm: at the 0.1 of the other models it is at 20 % after 70,000 samples."""


def vgg11(laboratory: Laboratory) -> ExperimentResult:
    """VGG11 on CIFAR-10, in full: static 32, 64 and 128 and the default policy."""
    return _compared(
        laboratory,
        "vgg11",
        reference_s=25.0,
        typical_run_s=1000.0,
        workload="cifar10-vgg11",
        learning_rate=VGG11_LEARNING_RATE,
        evaluation_samples=CIFAR10_SAMPLES,
    )


def resnet20(laboratory: Laboratory) -> ExperimentResult:
    """ResNet-20 on CIFAR-10, in full: static 32, 64 and 128 and the default policy."""
    return _compared(
        laboratory,
        "resnet20",
        reference_s=12.0,
        typical_run_s=450.0,
        workload="cifar10-resnet20",
        evaluation_samples=CIFAR10_SAMPLES,
    )


def transformer(laboratory: Laboratory) -> ExperimentResult:
    """A Transformer on a text, with AdamW: static 32, 64 and 128 and the default policy."""
    return _compared(
        laboratory, "transformer", reference_s=20.0, typical_run_s=250.0, workload="text-transformer", optimizer="adamw"
    )


def _compared(
    laboratory: Laboratory, name: str, *, reference_s: float, typical_run_s: float, **job: Any
) -> ExperimentResult:
    """All rows to the accuracy that `BASE` reaches in `reference_s`; `typical_run_s` is what a run takes of a core."""
    scenario = laboratory.cluster(
        f"paper-{name}",
        network=Network(),  # gradients as large as the model's own
        fixed_time_s=reference_s / 4,
        time_limit_s=3 * reference_s,
        evaluate_every_s=reference_s / 40,
        **job,
    )
    laboratory.check_data(scenario)
    target = _reached(laboratory, scenario, typical_run_s)
    print(f"  target: {target:.0%}, what {BASE} reached", flush=True)
    scenario = msgspec.structs.replace(scenario, target_accuracy=target)
    labels = [*STATICS, "rule"]
    table = laboratory.compare([scenario], labels, typical_run_s=typical_run_s)
    rows = [row[1:] for row in rows_of(table, {"": scenario}, labels)]
    panel = accuracy_panel(table, labels, scenario)
    return laboratory.result(f"paper-{name}", ["policy", *COLUMNS], rows, panels=[panel], notes=[_job(scenario)])


def _reached(laboratory: Laboratory, scenario: Scenario, typical_run_s: float) -> float:
    """The accuracy of `BASE` after a third of the time limit under a seed of its own, in whole percent."""
    end_s = scenario.time_limit_s / 3
    reference = msgspec.structs.replace(
        scenario, name=f"{scenario.name}-reference", target_accuracy=1.0, fixed_time_s=end_s, time_limit_s=end_s
    )
    table = laboratory.compare([reference], [BASE], seeds=[REFERENCE_SEED], typical_run_s=typical_run_s)
    (run,) = table.outcomes(BASE, [scenario.family])
    return math.floor(100 * run.evaluations[-1][1]) / 100


def _job(scenario: Scenario) -> str:
    rate, samples = scenario.learning_rate, scenario.base_global_batch_size
    return (
        f"Target: {scenario.target_accuracy:.0%}, what `{BASE}` reached in {scenario.time_limit_s / 3:g} s under "
        f"another seed; looked up every {scenario.evaluate_every_s:g} s. Fixed time: {scenario.fixed_time_s:g} s. "
        f"Optimizer: {scenario.optimizer}, at {rate:g} for {samples} samples per step."
    )
