from typing import Any

import pytest
from tests.support import examples
from tests.support.job_options import job_options

from dynamix.schemas.messages import Action, NodeRanks
from dynamix.schemas.messages.allocation import Allocation, Exchange
from dynamix.trainer.job.identity import Attempt, JobIdentity
from dynamix.trainer.steering.offers import Offers

IDENTITY = JobIdentity(
    job="mnist-0a1b2c3d",
    generation=1,
    attempt=Attempt("launch", 1, 3),
    nodes=(NodeRanks(node="node-a", ranks=(0, 1)),),
    max_local_batch_sizes=(1024, 512),
)


def _offers(**options: Any) -> Offers:
    return Offers(IDENTITY, job_options(**options), Allocation((64, 96)))


def _with(**changes: Any) -> Action:
    """The action of window 5, some of it changed."""
    return examples.action(5, **{"generation": 1, "local_batch_sizes": (64, 96), "deltas": (0, 0)} | changes)


ACTION = _with()


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (_with(job="other-0a1b2c3d"), "job"),
        (_with(generation=0), "generation"),
        (_with(generation=2), "generation"),
        (_with(local_batch_sizes=(64,)), "length"),
        (_with(local_batch_sizes=(64, 64, 64)), "length"),
        (_with(local_batch_sizes=(31, 64)), "bounds"),
        (_with(local_batch_sizes=(1024, 513)), "bounds"),
        (_with(rate_factor=1.5), "lever"),
    ],
)
def test_an_action_that_does_not_fit_is_refused_and_counted(action: Action, reason: str) -> None:
    offers = _offers()
    assert offers.consider(action, 7) == reason
    assert offers.num_refused == {reason: 1}
    assert offers.adopt(7) is None


@pytest.mark.parametrize(
    ("permission", "exchange", "reason"),
    [
        ("exact", Exchange(codec="rows", route="shares", shares=(1.0, 3.0)), None),
        ("exact", Exchange(codec="int8"), "lever"),
        ("lossy", Exchange(codec="int8", route="shares"), None),
        ("lossy", Exchange(every=2), "lever"),
        ("lossy", Exchange(codec="unknown"), "lever"),
        ("lossy", Exchange(route="shares", shares=(1.0, 1.0, 1.0)), "lever"),
    ],
)
def test_gradients_travel_only_as_the_job_permits(permission: str, exchange: Exchange, reason: str | None) -> None:
    action = _with(exchange=exchange)
    offers = _offers(exchange=permission, supports_exchange=True)
    assert offers.consider(action, 7) == reason
    assert offers.adopt(7) == (None if reason else action)
    assert _offers(exchange=permission).consider(action, 7) == "lever"  # the ranks cannot


def test_a_learning_rate_is_changed_only_where_the_job_lets_its_runs_explore_it() -> None:
    assert _offers(family="mnist").consider(_with(rate_factor=1.5), 6) == "lever"
    assert _offers(family="mnist", explores=("learning_rate",)).consider(_with(rate_factor=1.5), 6) is None


def test_an_action_may_be_four_windows_old_and_is_newer_than_the_adopted() -> None:
    offers = _offers()
    offers.consider(ACTION, 7)
    assert offers.adopt(9) == ACTION
    for window in (0, 4, 5):
        assert offers.consider(_with(window=window), 10) == "not_newer"
    assert offers.consider(_with(window=6), 10) is None
    assert offers.adopt(11) is None
    assert offers.num_refused == {"not_newer": 3, "stale": 1}


@pytest.mark.parametrize("window", [7, 8, 57])
def test_an_action_of_a_window_yet_to_come_is_refused_and_keeps_no_other_out(window: int) -> None:
    offers = _offers()
    assert offers.consider(_with(window=window), 7) == "future"
    assert offers.adopt(7) is None
    assert offers.consider(_with(window=6), 7) is None
    assert offers.adopt(7) == _with(window=6)
    assert offers.num_refused == {"future": 1}


@pytest.mark.parametrize(
    ("supports", "adopted", "refused"), [(True, _with(split="tracking"), {}), (False, ACTION, {"tracking": 1})]
)
def test_a_split_by_tracking_is_adopted_for_its_sizes_where_the_ranks_cannot(
    supports: bool, adopted: Action, refused: dict[str, int]
) -> None:
    offers = _offers(supports_tracking=supports)
    assert offers.consider(_with(split="tracking"), 7) is None
    assert offers.adopt(7) == adopted
    assert offers.num_refused == refused
