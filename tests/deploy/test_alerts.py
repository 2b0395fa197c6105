"""Every alert has a trial and an entry of the runbook."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import alert_trials
from tests.support.alert_trials import Phase, Recorded, check_alerts, needs

ROOT = Path(__file__).parents[2]
pytestmark = needs("promtool")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(alert_trials.RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_is_tried_here_and_has_an_entry_of_the_runbook() -> None:
    trials = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*_alerts.py"))
    tried = set(re.findall(r'"(Dynamix\w+)"', trials))
    assert {rule["alert"] for rule in rules()} == tried
    headings = re.findall(r"^### (Dynamix\w+)$", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)
    assert {rule["alert"] for rule in rules()} == set(headings)
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"].endswith((".", "?"))
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}


def test_a_rule_that_is_never_raised_would_be_found(tmp_path: Path) -> None:
    down = {"reward": Recorded(None, None, 1.0)}
    with pytest.raises(AssertionError, match="DynamixServiceDown"):
        check_alerts(tmp_path, Phase(20, down, set()))
