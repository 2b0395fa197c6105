"""The Grafana dashboard: its queries are PromQL, ask for what the services show, and leave no panel without a unit."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.alert_trials import RULES, needs
from tests.support.prometheus import grafana_dashboard, grafana_panels, grafana_queries
from tests.support.shown_names import shown_names

ROOT = Path(__file__).parents[2]
OF_PROMETHEUS = {"up", "ALERTS", "process_resident_memory_bytes"}
CALLED = re.compile(r"\b(dynamix[\w:]*|process_\w+|up|ALERTS)(?=[{\[) ]|$)")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_panels_have_a_meaning_a_unit_and_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in grafana_panels():
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in grafana_dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("source", ["dashboard", "alerts"])
def test_only_numbers_that_a_service_shows_are_asked_for(source: str) -> None:
    asked = grafana_queries() if source == "dashboard" else [rule["expr"] for rule in rules()]
    names = {name for query in asked for name in CALLED.findall(re.sub(r'"[^"]*"', '""', query))}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert len(names) > 15
    assert names - shown_names() - recorded - OF_PROMETHEUS == set()


def test_every_number_that_is_shown_is_explained() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    named = set(re.findall(r"`(dynamix_\w+)`", text))
    left_out = {name for name in shown_names() if not name.startswith("dynamix_bus_")} - named
    assert left_out == set()
    assert {name for name in named if not name.endswith("_")} - shown_names() == set()


@needs("promtool")
def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    groups = [
        {"name": "g", "rules": [{"record": f"q:{n}", "expr": query} for n, query in enumerate(grafana_queries())]}
    ]
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": groups}))
    for file in (tmp_path / "queries.yaml", RULES):
        told = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
        assert (told.returncode, told.stderr) == (0, ""), told.stderr
    for config in ("prometheus.yml", "compose.yml"):
        command = ["promtool", "check", "config", str(ROOT / "deploy/prometheus" / config)]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout + told.stderr
