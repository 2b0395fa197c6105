import numpy as np
import pytest
from tests.support import examples

from dynamix.arbitrator.deciding.signatures import (
    STUCK_WINDOWS,
    Finding,
    SizeWatch,
    reward_signatures,
    spread_signature,
    value_signature,
)

JOB = examples.job()  # four ranks from 32 to 1024


def findings_of(watch: SizeWatch, decisions: list[tuple[int, ...]]) -> list[tuple[int, Finding]]:
    found = [(index, watch.observe_sizes(sizes)) for index, sizes in enumerate(decisions)]
    return [(index, finding) for index, finding in found if finding is not None]


def test_three_of_four_ranks_at_their_minimum_for_20_decisions_are_reported_once() -> None:
    found = findings_of(SizeWatch(JOB), [(32, 32, 32, 500)] * (3 * STUCK_WINDOWS))
    assert [(index, finding.signature, finding.value) for index, finding in found] == [(19, "size-stuck", 0.75)]
    assert "75% of the ranks were at their minimum of 32" in found[0][1].explanation


def test_ranks_whose_bounds_leave_no_choice_do_not_count() -> None:
    job = examples.job(max_local_batch_sizes=(32, 32, 32, 1024))
    assert findings_of(SizeWatch(job), [(32, 32, 32, 500)] * 50) == []
    assert [finding.value for _, finding in findings_of(SizeWatch(job), [(32,) * 4] * 50)] == [1.0]
    assert findings_of(SizeWatch(examples.job(max_local_batch_sizes=(32,) * 4)), [(32,) * 4] * 50) == []


def test_a_plateau_and_a_collapse_by_hand() -> None:
    """Best five: mean 10, variance 2; last five: mean 0, variance 2."""
    assert [(one.signature, one.value) for one in reward_signatures([5.0] * 30)] == [("reward-plateau", 0.0)]
    returns = [8.0, 9.0, 10.0, 11.0, 12.0] + [5.0] * 5 + [-2.0, -1.0, 0.0, 1.0, 2.0]
    collapse = next(finding for finding in reward_signatures(returns) if finding.signature == "reward-collapse")
    assert collapse.value == pytest.approx(10 / np.sqrt(2))


def test_the_coefficient_of_variation_of_10_20_30_is_041() -> None:
    finding = spread_signature([10.0, 20.0, 30.0])
    assert finding is not None
    assert finding.value == pytest.approx(np.sqrt(200 / 3) / 20)
    assert spread_signature([10.0, 11.0, 12.0]) is None
    assert spread_signature([1.0, 100.0]) is None


def test_a_value_function_that_explains_five_percent_is_reported() -> None:
    finding = value_signature([0.9] * 5 + [0.05] * 10)
    assert finding is not None
    assert finding.value == pytest.approx(0.05)
    assert value_signature([0.05] * 5 + [0.9] * 10) is None
    assert value_signature([0.0] * 9) is None
