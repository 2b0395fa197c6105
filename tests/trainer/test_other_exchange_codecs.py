"""Exchange codecs of other packages: named by a job, chosen by decisions, refused where a job permits no loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.training import flat_parameters, offer
from tests.support.whole_numbers import SIZES, Whole, attach, distributed, train_step

from dynamix.schemas.messages.allocation import EXACT, Exchange


def _use(installed: Path) -> None:
    import sys  # noqa: PLC0415 - in the rank's process

    sys.path.insert(0, str(installed))


def _trained(
    _rank: int, installed: Path, options: dict[str, Any], plan: dict[int, Exchange], whole: bool = True
) -> dict[str, Any]:
    """Parameters after 20 steps, the exchange of each, and what a decision was refused for."""
    _use(installed)
    model = distributed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    ruled = []
    with attach(model, optimizer, Whole(whole=whole), **options) as session:
        for batch in session.loader:
            ruled.append(session.allocation.exchange)
            if session.step_index in plan:
                offer(session, SIZES, exchange=plan[session.step_index])
            train_step(session, model, optimizer, batch)
            if len(ruled) == 20:
                break
        residuals = [each for part in session._models.exchanges for each in part.residuals()]
    return {"parameters": flat_parameters(model), "ruled": ruled, "residuals": residuals}


@pytest.mark.parametrize(
    "options", [{"policy_options": {"codec": "reversed"}}, {"exchange": Exchange(codec="reversed")}]
)
def test_a_codec_without_loss_changes_nothing(example_extension: Path, options: dict[str, Any]) -> None:
    exact = run_ranks(_trained, 2, example_extension, {}, {})[0]
    assert set(exact["ruled"]) == {EXACT}
    assert exact["parameters"].abs().max() > 0
    for found in run_ranks(_trained, 2, example_extension, options, {}):
        assert set(found["ruled"]) == {Exchange(codec="reversed")}
        assert torch.equal(found["parameters"], exact["parameters"])


def test_decisions_choose_among_the_codecs_that_the_job_names(example_extension: Path) -> None:
    coarse = Exchange(codec="coarse")
    options = {"exchange": "lossy", "policy_options": {"codec": "coarse"}}
    plan = {2: EXACT, 8: Exchange(codec="reversed"), 10: coarse}
    first, second = run_ranks(_trained, 2, example_extension, options, plan, False)
    assert first["ruled"] == [coarse] * 6 + [EXACT] * 8 + [coarse] * 6, "it does not name `reversed`"
    assert torch.equal(first["parameters"], second["parameters"])
    exact = run_ranks(_trained, 2, example_extension, {}, {}, False)[0]
    assert 0 < (first["parameters"] - exact["parameters"]).abs().max() < 0.05
