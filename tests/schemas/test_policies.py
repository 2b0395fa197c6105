import pytest

from dynamix.schemas.messages.policies import DEFAULT_POLICY, DIVIDED_BY_RANKS, SPLIT_POLICY, initial_split


@pytest.mark.parametrize(
    ("policy", "options", "supports_tracking", "expected"),
    [
        ("rule", {}, True, "tracking"),
        ("rule", {}, False, "fixed"),
        ("rule", {"track": 0.0}, True, "fixed"),
        ("goodput", {}, True, "fixed"),
        ("goodput", {"track": 1.0}, True, "tracking"),
        ("static", {}, True, "fixed"),
        ("ppo-paper", {}, True, "fixed"),
    ],
)
def test_the_ranks_divide_the_batch_from_the_first_step_where_the_policy_leaves_it_to_them(
    policy: str, options: dict[str, float], supports_tracking: bool, expected: str
) -> None:
    assert initial_split(policy, options, supports_tracking=supports_tracking) == expected


def test_the_default_policies_leave_the_division_to_the_ranks() -> None:
    assert {DEFAULT_POLICY, SPLIT_POLICY} <= DIVIDED_BY_RANKS
