"""What is promised, and whether a run kept it."""

from typing import Any

from bench.kernel.run_times import BULK
from bench.kernel.training import PACED

from dynamix.collector.ebpf.program import INGRESS

MAX_NS_PER_RUN = 200.0
MIN_GBIT_PER_S = 10.0
MAX_BULK_PERCENT = 1.0
MAX_TRAINING_PERCENT = 0.1


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets, of the rows of `run_times`: bulk traffic, and the job of bench.overhead."""
    by_name = {row["name"]: row for row in rows}
    bulk, training = by_name[BULK.name], by_name[PACED.name]
    return [
        _at_most("ns of a run of cgroup_skb, bulk", bulk["programs"][INGRESS]["ns_per_run"], MAX_NS_PER_RUN),
        _at_least("Gbit/s over loopback, bulk", bulk["gbit_per_s"], MIN_GBIT_PER_S),
        _at_most("percent of the machine, bulk", bulk["machine_percent"], MAX_BULK_PERCENT),
        _at_most("percent of the machine, DDP job", training["machine_percent"], MAX_TRAINING_PERCENT),
    ]


def _at_most(name: str, value: float | None, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "at_most": limit, "met": value is not None and value <= limit}


def _at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "at_least": limit, "met": value >= limit}
