import pytest
from tests.support import examples

from dynamix.arbitrator.policies.options import tracks
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.schemas.policies import STIGMERGY, Option, check_options, switch

OPTIONS = {"smoothing": Option(0.3, 0, 1, "weight of the newest"), "track": switch(1, "divides"), "step": switch(0, "")}


def test_an_unknown_option_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match="policy 'rule' has no option 'smooting': did you mean smoothing"):
        check_options("rule", OPTIONS, {"smooting": 0.5})
    with pytest.raises(ValueError, match="known are version"):
        check_options("rule", {}, {"x": 0.5})


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_value_out_of_bounds_is_refused_with_the_bounds(value: float) -> None:
    with pytest.raises(ValueError, match="must be from 0 to 1: weight of the newest"):
        check_options("rule", OPTIONS, {"smoothing": value})


def test_only_a_job_that_can_is_left_to_divide_its_batch() -> None:
    able, unable = examples.job(supports_tracking=True), examples.job()
    assert (tracks(OPTIONS, able), tracks(OPTIONS, unable)) == (True, False)
    assert not tracks(OPTIONS, examples.job(supports_tracking=True, policy_options={"track": 0.0}))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policys_defaults_are_within_its_own_bounds(policy: object) -> None:
    options = policy.options  # type: ignore[attr-defined]
    assert "track" in options or policy is POLICIES[STIGMERGY]  # which leaves the division to traces
    check_options("itself", options, {name: one.default for name, one in options.items()})
