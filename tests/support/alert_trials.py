"""Alert rules tried on recorded scrapes: a fault is scraped twice, and goes on for as long as asked, by promtool."""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
REQUIRED = "REQUIRE_PROMETHEUS_TESTS"
"""With 1, which CI sets once it has installed Prometheus, what cannot run fails."""

LOADED = ("dynamix_process_cpu_seconds_total", "dynamix_loop_lag_seconds_total")
"""Depend on what else the machine does: left out unless a trial is about them."""


def needs(program: str) -> pytest.MarkDecorator:
    """Skip where a program of Debian's package `prometheus` is missing, and say so; fail where CI has installed it."""
    missing = shutil.which(program) is None
    if missing and os.environ.get(REQUIRED) == "1":
        raise AssertionError(f"{REQUIRED}=1, and yet there is no {program}")
    return pytest.mark.skipif(
        missing,
        reason=f"{program} is MISSING: alerts and scrapes are NOT tested here (Debian: apt-get install prometheus)",
    )


class Sample(NamedTuple):
    """One number of a scrape."""

    is_counter: bool
    value: float


class Recorded(NamedTuple):
    """Two scrapes of one state of affairs, and the seconds between them; `None` for what did not answer."""

    before: dict[str, Sample] | None
    after: dict[str, Sample] | None
    seconds: float


class Phase(NamedTuple):
    """So many minutes of what was recorded, by the address that was scraped, and what is raised at their end."""

    minutes: int
    recorded: dict[str, Recorded]
    firing: set[str]


def samples(text: str, address: str, *, without: tuple[str, ...] = LOADED) -> dict[str, Sample]:
    """All numbers of a scrape of ours, as Prometheus stores them."""
    return {
        series(sample.name, {**sample.labels, "job": "dynamix", "instance": address}): Sample(
            family.type == "counter", sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("dynamix_") and sample.name not in without
    }


def series(name: str, labels: dict[str, str]) -> str:
    """A series as PromQL writes it."""
    inside = ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}"


async def record(
    scrapes: Mapping[str, Callable[[], str]],
    happening: Awaitable[object] | None = None,
    *,
    without: tuple[str, ...] = LOADED,
) -> dict[str, Recorded]:
    """Scrape everything before and after something that happens, or twice for nothing."""

    def scrape() -> dict[str, dict[str, Sample]]:
        return {address: samples(text(), address, without=without) for address, text in scrapes.items()}

    begin_s, before = time.monotonic(), scrape()
    if happening is not None:
        await happening
    seconds, after = time.monotonic() - begin_s, scrape()
    return {address: Recorded(before[address], after[address], seconds) for address in scrapes}


def check_alerts(tmp_path: Path, *phases: Phase) -> None:
    """Let promtool tell at the end of each phase which alerts are raised: those of the phase and no other."""
    ends = [sum(phase.minutes for phase in phases[: index + 1]) - 1 for index in range(len(phases))]
    raised = 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0'
    trial = {
        "interval": "1m",
        "input_series": [{"series": name, "values": " ".join(values)} for name, values in input_series(phases)],
        "promql_expr_test": [
            {
                "expr": raised,
                "eval_time": f"{end}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(phase.firing)],
            }
            for end, phase in zip(ends, phases, strict=True)
        ],
    }
    file = tmp_path / "trial.yaml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [trial]}))
    told = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


def input_series(phases: Sequence[Phase]) -> Iterator[tuple[str, list[str]]]:
    """Every series and its value of each minute."""
    addresses = {address for phase in phases for address in phase.recorded}
    for address in sorted(addresses):
        recorded = [phase.recorded[address] for phase in phases]
        up = [str(int(one.after is not None)) for one in recorded]
        yield (
            series("up", {"job": "dynamix", "instance": address}),
            [value for phase, value in zip(phases, up, strict=True) for _ in range(phase.minutes)],
        )
        names = {name for one in recorded for name in (one.after or {})}
        for name in sorted(names):
            yield name, _values(name, phases, recorded)


def _values(name: str, phases: Sequence[Phase], recorded: list[Recorded]) -> list[str]:
    values: list[str] = []
    for phase, one in zip(phases, recorded, strict=True):
        last = None if one.after is None else one.after.get(name)
        first = None if one.before is None else one.before.get(name, last)
        if last is None or first is None:
            values += ["stale"] * phase.minutes
        elif last.is_counter:  # the fault goes on as it was measured
            per_minute = 60 * (last.value - first.value) / max(one.seconds, 1e-3)
            begin = next((float(value) for value in reversed(values) if value != "stale"), first.value)
            values += [f"{begin + per_minute * (minute + 1):.9g}" for minute in range(phase.minutes)]
        else:
            values += [f"{last.value:.9g}" if math.isfinite(last.value) else "stale"] * phase.minutes
    return values
