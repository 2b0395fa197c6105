"""Experiments without learning: static sizes, cluster sizes, topologies."""

from bench.harness.figure import Curve, Panel

from dynamix.lab.simulator.scenario import Network

from .laboratory import Laboratory
from .result import BASE, COLUMNS, ExperimentResult, accuracy_panel, ratio_of, rows_of

STATICS = ("static@32", "static@64", "static@128")
"""The published baselines."""
ROWS = (BASE, "random", "goodput", "rule")
WORKER_COUNTS = (8, 16, 32, 64, 128)
GRADIENT_BYTES = 8_000_000
SLOW_MBIT_S = 1000.0
"""A network on which the topology matters."""


def static_sizes(laboratory: Laboratory) -> ExperimentResult:
    """Static 32, 64 and 128 per worker with SGD, and the default policy beside them."""
    scenario = laboratory.image_job("image-sgd")
    labels = [*STATICS, "rule"]
    table = laboratory.compare([scenario], labels)
    rows = [row[1:] for row in rows_of(table, {"": scenario}, labels)]
    return laboratory.result(
        "static",
        ["policy", *COLUMNS],
        rows,
        panels=[accuracy_panel(table, labels, scenario)],
        notes=[*laboratory.image_notes("static"), laboratory.tuning_note(labels)],
    )


def cluster_sizes(laboratory: Laboratory) -> ExperimentResult:
    """8 to 128 workers of the same four speeds: what steering is worth as the cluster grows."""
    counts = WORKER_COUNTS[:1] if laboratory.scale.name == "smoke" else WORKER_COUNTS
    scenarios = {number: laboratory.cluster(f"n{number}", num_workers=number) for number in counts}
    table = laboratory.compare(scenarios.values(), ROWS)
    rows = rows_of(table, scenarios, ROWS)
    curves = [
        Curve(
            label=label,
            points=[
                (number, ratio.value)
                for number, scenario in scenarios.items()
                if (ratio := ratio_of(table, label, scenario)) is not None
            ],
        )
        for label in ROWS
    ]
    panel = Panel(
        title=f"Time to target against {BASE}",
        x="workers",
        y="ratio",
        curves=curves,
        logarithmic=True,
    )
    return laboratory.result(
        "workers",
        ["workers", "policy", *COLUMNS],
        rows,
        panels=[panel],
        notes=[laboratory.tuning_note(ROWS)],
    )


def topologies(laboratory: Laboratory) -> ExperimentResult:
    """Ring all-reduce against parameter servers, on a network of 1 Gbit/s with gradients of 8 MB."""
    ring = Network(bandwidth_mbit_s=SLOW_MBIT_S, gradient_bytes=GRADIENT_BYTES)
    networks = {"ring all-reduce": ring} | {
        f"{number} parameter server{'s' * (number > 1)}": Network(
            topology="parameter-server",
            num_servers=number,
            bandwidth_mbit_s=SLOW_MBIT_S,
            gradient_bytes=GRADIENT_BYTES,
        )
        for number in (1, 8)
    }
    scenarios = {
        name: laboratory.cluster(
            name.replace(" ", "-"), network=network, fixed_time_s=60.0, time_limit_s=600.0, evaluate_every_s=1.0
        )
        for name, network in networks.items()
    }
    table = laboratory.compare(scenarios.values(), ROWS)
    rows = rows_of(table, scenarios, ROWS)
    panels = [accuracy_panel(table, list(ROWS), scenario) for scenario in scenarios.values()]
    return laboratory.result(
        "topology",
        ["network", "policy", *COLUMNS],
        rows,
        panels=panels,
        notes=[laboratory.tuning_note(ROWS)],
    )
