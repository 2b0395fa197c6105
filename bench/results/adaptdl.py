"""AdaptDL's published goodput code on train scenarios, beside our goodput, the default policy and the best static size.

The policy is an extension package (bench/adaptdl), and AdaptDL another one: `make adaptdl` installs both into out/.
"""

import importlib.metadata

import msgspec
import numpy as np

from dynamix.lab.experiments.comparison.outcomes import OutcomeTable
from dynamix.lab.experiments.comparison.scores import MeanInterval
from dynamix.lab.experiments.episodes.suite import suite_named
from dynamix.lab.simulator.scenario import Scenario
from dynamix.runtime.extensions import extension_names

from .laboratory import SMOKE, Laboratory
from .result import Cell, ExperimentResult, accuracy_panel

POLICY = "adaptdl"
STATIC, GOODPUT = "best-static", "goodput+track"
VARIANTS = (POLICY, f"{POLICY}:slowest=1", f"{POLICY}+track", f"{POLICY}:slowest=1@32", f"{POLICY}+track@32")
LABELS = (STATIC, *VARIANTS, GOODPUT, "rule")
SCENARIOS = ("mixed-8", "stragglers-8", "slow-link-8", "congestion-8", "adam-8", "homogeneous-8")
SHOWN = ("mixed-8", "stragglers-8", "homogeneous-8")
"""Scenarios in the picture."""
PACKAGES = ("adaptdl", "autograd", "scipy")
NOTE = (
    "The six scenarios are train scenarios, each of another family; all count alike. `adaptdl` divides equally and "
    "fits the times of rank 0, as published; with `slowest=1` those of the rank that computes longest; with `+track` "
    "our fast loop divides. It never goes below the batch that a job begins with, 64 samples per worker or, with "
    "`@32`, half of it. Best static and goodput have the settings that `dynamix tune` chose for the family."
)


class PackageMissingError(RuntimeError):
    """What an experiment needs is not installed; the text says how to install it."""


def published_goodput(laboratory: Laboratory) -> ExperimentResult:
    """AdaptDL's own goodput code, with its equal division and with our fast loop."""
    if POLICY not in extension_names("dynamix.policies"):
        raise PackageMissingError("AdaptDL's package is not installed: run this experiment with `make adaptdl`")
    scenarios = _scenarios(is_small=laboratory.scale.name == "smoke")
    table = laboratory.compare(scenarios, LABELS, tuned=laboratory.tuned_by_family)
    families = [scenario.family for scenario in scenarios]
    columns = ["policy", "vs best static", f"vs `{GOODPUT}`", "missed", "mean local batch", *families]
    found = laboratory.result(
        POLICY,
        columns,
        [_row(table, label, scenarios) for label in LABELS],
        panels=[accuracy_panel(table, list(LABELS), scenario) for scenario in scenarios if scenario.name in SHOWN],
        notes=[f"Times to target, paired; below 1 is faster. By family: against {STATIC}. {NOTE}"],
    )
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return msgspec.structs.replace(found, versions=found.versions | packages)


def _scenarios(*, is_small: bool) -> list[Scenario]:
    known = {scenario.name: scenario for scenario in suite_named("train").scenarios}
    if is_small:
        return [msgspec.structs.replace(known[SCENARIOS[0]], **SMOKE)]
    return [known[name] for name in SCENARIOS]


def _row(table: OutcomeTable, label: str, scenarios: list[Scenario]) -> list[Cell]:
    families = [scenario.family for scenario in scenarios]
    sizes = [
        run.samples_seen / run.num_steps / scenario.world_size
        for scenario in scenarios
        for run in table.outcomes(label, [scenario.family])
    ]
    return [
        f"`{label}`",
        _ratio(table, label, STATIC, families),
        _ratio(table, label, GOODPUT, families),
        f"{table.num_misses(label, families)} of {len(sizes)}",
        float(np.mean(sizes)),
        *(_ratio(table, label, STATIC, [family]) for family in families),
    ]


def _ratio(table: OutcomeTable, label: str, base: str, families: list[str]) -> MeanInterval | None:
    found = table.ratio(label, base, families)
    return None if found is None else MeanInterval(found.ratio, found.low, found.high)
