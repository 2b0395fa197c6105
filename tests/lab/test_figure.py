"""The picture of a verdict."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from tests.support.small_suites import made_up, tuned_for, write_suite

from dynamix.lab.experiments.comparison import evaluation
from dynamix.lab.experiments.comparison.contenders import parse_contenders, with_references
from dynamix.lab.experiments.comparison.evaluation import fill, plan
from dynamix.lab.experiments.comparison.figure import draw, mean_curve
from dynamix.lab.experiments.comparison.runs import Ledger
from dynamix.lab.experiments.comparison.verdict import VerdictBuilder


def test_a_run_that_is_over_keeps_its_last_accuracy() -> None:
    curves = [[(0.0, 0.0), (1.0, 0.5)], [(0.0, 0.0), (2.0, 1.0)], []]
    assert mean_curve(curves, np.array([0.0, 1.0, 2.0])).tolist() == [0.0, 0.5, 0.75]


def test_every_family_and_row_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "outcomes", made_up(lambda task: None if task.setting.policy == "random" else 1.0))
    suite = write_suite(tmp_path / "suite", mixed=1000, alike=4000)
    contenders = with_references(parse_contenders("rule"))
    tuned = tuned_for(mixed=64)
    cells = plan(suite, contenders, range(2), tuned)
    with Ledger() as ledger:
        fill(cells, ledger)
        judge = VerdictBuilder(suite, contenders, cells, ledger, tuned)
    draw(judge.verdict(""), judge.table, "mixed-2", tmp_path / "figure.png")
    pixels = matplotlib.image.imread(tmp_path / "figure.png")
    assert pixels.shape[1] > pixels.shape[0] > 400
    assert pixels.std() > 0.05  # something is on it
