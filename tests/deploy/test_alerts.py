"""Alerts and the Grafana dashboard: rules tried by promtool, and services that show the numbers that they ask for."""

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.support import examples
from tests.support.brokers import publish_unstored, until
from tests.support.control_plane import NODE, one_node_job, report_of
from tests.support.prometheus import RULES, eventually, grafana_queries, needs
from tests.support.services_here import services_here

from dynamix.arbitrator import shown as arbitrator_shown
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.messages import Job

ROOT = Path(__file__).parents[2]
TRIALS = RULES.with_name("alerts.test.yaml")
NOT_SHOWN_HERE = {
    "dynamix_signature": "a learner",
    "dynamix_probe_cost_seconds_total": "an eBPF probe",
    "dynamix_stream_copy_lag": "a cluster of servers",
    "dynamix_credential_seconds_left": "a login with a key",
    "dynamix_job_progress_ratio": "a job with a known number of epochs",
    "dynamix_job_refused_actions": "a trainer that refuses actions",
}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> None:
    told = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


@needs("promtool")
def test_every_alert_is_raised_by_its_fault_and_clears() -> None:
    promtool("test", "rules", str(TRIALS))


def test_every_alert_has_a_trial_and_an_entry_of_the_runbook() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts <= {trial["name"] for trial in yaml.safe_load(TRIALS.read_text())["tests"]}
    headings = re.findall(r"^### (Dynamix\w+)$", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)
    assert alerts == set(headings)


@needs("promtool")
def test_prometheus_reads_rules_configurations_and_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    groups = [
        {"name": "g", "rules": [{"record": f"q:{n}", "expr": query} for n, query in enumerate(grafana_queries())]}
    ]
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": groups}))
    promtool("check", "rules", str(tmp_path / "queries.yaml"), str(RULES))
    for config in ("prometheus.yml", "compose.yml"):
        promtool("check", "config", str(RULES.with_name(config)))


async def test_services_show_each_fault_in_the_numbers_that_alerts_and_the_dashboard_ask_for(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plane, one fault after the other; what is asked for and never shown has another source."""
    monkeypatch.setattr(arbitrator_shown, "STREAMS_EVERY_S", 0.05)
    log = tmp_path / "nats.log"
    log.write_text("[ERR] an older Publish Violation\n")
    async with services_here(bus, "collector", "reward", "arbitrator") as services:

        async def shows(name: str, value: float, **labels: str) -> None:
            async def is_shown() -> bool:
                text = "".join(service.scrape() for service in services.values())
                lines = [line for line in text.splitlines() if line.startswith(f"dynamix_{name}{{")]
                return any(
                    line.endswith(f" {float(value)}")
                    and all(f'{key}="{label}"' in line for key, label in labels.items())
                    for line in lines
                )

            await eventually(is_shown)

        async def train(job: Job, num_windows: int, *speeds: float, begin: int = 0, **changes: Any) -> None:
            for window in range(begin, begin + num_windows):
                report = report_of(job, window, job.initial_local_batch_sizes, speeds or (100.0,) * 4)
                await bus.publish(msgspec.structs.replace(report, **changes))
                await shows("job_state_window", window, training_job=job.job)

        async def end(job: Job, reason: str) -> None:
            await bus.publish(msgspec.structs.replace(job, phase="ended", end_reason=reason))

        following = asyncio.create_task(
            arbitrator_shown.ShownDecisions(services["arbitrator"].context.metrics).follow_violations(log)
        )
        halted, stuck = (
            one_node_job(job="halted-00000000", policy="no-such"),
            one_node_job(job="stuck-00000000", initial_local_batch_sizes=(32, 32, 32, 160), base_global_batch_size=256),
        )
        for job in (halted, stuck):
            await bus.publish(job)
        await train(halted, 1)
        await shows("job_halted", 1, training_job=halted.job)
        await train(stuck, 22, 100.0, 100.0, 100.0, 500.0)
        await shows("job_stuck_ratio", 0.75, training_job=stuck.job)
        await end(stuck, "RuntimeError: Timed out waiting 1800000ms for recv operation")
        await shows("jobs_ended_total", 1, reason="timeout")

        for number, time_s in enumerate((1.0, 1.1, 10.0)):
            run = one_node_job(job=f"mnist-{number:08d}")
            await bus.publish(run)
            await train(run, 1, totals=examples.totals(0, time_s=time_s), held_out_accuracy=0.8)
            await shows("job_decided_window", 0, training_job=run.job)
            await end(run, "completed")
        await shows("jobs_ended_total", 3, reason="completed")
        assert "dynamix_runs_variation_ratio{" in services["arbitrator"].scrape()

        again = one_node_job(generation=1)
        await bus.publish(again)
        await train(again, 1, num_reports_dropped=3)
        await shows("job_generation", 1, training_job=again.job)
        await shows("job_reports_dropped", 3, training_job=again.job)
        await train(again, 3, begin=1)
        await publish_unstored(bus, subjects.of("state", "job-1", NODE), b"no message")
        await until(lambda: services["arbitrator"].context.counters.get("dead_letters"))

        with log.open("a") as lines:
            lines.write('[INF] something else\n[ERR] Publish Violation - JWT User "U1", Subject "x"\n')
        await shows("broker_violations_total", 1)
        log.rename(tmp_path / "nats.log.1")
        log.write_text("[ERR] Subscription Violation\n[ERR] maximum subscriptions exceeded\n")
        await shows("broker_violations_total", 3)
        following.cancel()
        shown = set(re.findall(r"^(dynamix_\w+)", "".join(s.scrape() for s in services.values()), flags=re.MULTILINE))
    asked = {
        name
        for query in (*grafana_queries(), *(rule["expr"] for rule in rules()))
        for name in re.findall(r"\bdynamix_\w+", re.sub(r'"[^"]*"', "", query))
    }
    assert asked - shown == set(NOT_SHOWN_HERE)
