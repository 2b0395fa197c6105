"""A node's agent: what it leaves, from known rows (1280 samples in 0.5 s, 0.3 s of waiting in 10 steps of 0.1 s)."""

from typing import Any

import pytest
from tests.support import examples

from dynamix.collector.agent import trace_of
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import FieldView, SeenTrace, Trace


def seen(strength: float = 1.0, appetite: float = 512.0, waiting_s: float = 0.03) -> SeenTrace:
    return SeenTrace(strength=strength, appetite=appetite, waiting_s=waiting_s)


def left(own: SeenTrace | None = None, **changes: Any) -> Trace:
    totals = changes.pop("totals", examples.totals(4))
    view = FieldView(**({"activity": (0.0, 0.0), "own": own} | changes))
    return trace_of(examples.report(window=4, totals=totals, field=view))


def test_jobs_of_other_policies_have_no_agents() -> None:
    assert trace_of(examples.report()) is None


def test_the_first_trace_is_what_was_measured() -> None:
    trace = left()
    assert (trace.node, trace.window, trace.ranks) == ("node-a", 4, (0, 1))
    assert trace.activity == (2560.0, 2560.0)
    assert trace.waiting_s == pytest.approx(0.03)
    assert trace.appetite == 512.0


@pytest.mark.parametrize(("strength", "expected"), [(1.0, 1780.0), (0.5, 2170.0)])
def test_half_of_a_trace_evaporates_and_of_a_weaker_one_more(strength: float, expected: float) -> None:
    """0.5 * 1000 + 0.5 * 2560, and 0.25 * 1000 + 0.75 * 2560."""
    assert left(seen(strength), activity=(1000.0, 1000.0)).activity == (expected, expected)


def test_the_waiting_around_counts_where_it_is_less() -> None:
    assert left(around=(seen(waiting_s=0.01), seen(waiting_s=0.5))).waiting_s == pytest.approx(0.011)


@pytest.mark.parametrize(
    ("rate_exponent", "noise_multiplier", "expected"),
    [
        (0.5, 1.0, 1024.0),  # a noise scale of 2000 and 0.03 s of 0.1 s of communication: as large as permitted
        (0.0, 0.01, 256.0),  # without noise every sample more is lost
        (0.0, 0.3, 512.0 * 2 ** (-8 / 16)),  # f / (512 f + 600) / (0.03 + 0.07 f) is greatest at f = 0.709
    ],
)
def test_the_wish_is_the_global_batch_of_the_greatest_progress_per_second(
    rate_exponent: float, noise_multiplier: float, expected: float
) -> None:
    options = {"noise_multiplier": noise_multiplier}
    trace = left(keeps_global_batch=False, rate_exponent=rate_exponent, options=options)
    assert trace.appetite == pytest.approx(expected)


def test_an_appetite_diffuses_from_the_cells_beside_it() -> None:
    """0.2 of the mean of 100 and of 400 at half the strength, and 0.8 of 1024."""
    around = (seen(appetite=100.0), seen(strength=0.5, appetite=400.0))
    trace = left(keeps_global_batch=False, rate_exponent=0.5, around=around)
    assert trace.appetite == pytest.approx(0.2 * 200.0 + 0.8 * 1024.0)


def test_without_a_known_noise_the_appetite_stays() -> None:
    trace = left(seen(appetite=300.0), keeps_global_batch=False, totals=examples.totals(4, noise=None))
    assert trace.appetite == pytest.approx(300.0)


def test_a_view_that_does_not_fit_the_rows_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="a view of 3 ranks with 2 rows"):
        left(activity=(1.0, 1.0, 1.0))
