"""The allocation before any decision: exchanges as people write them, what a job permits, who divides the batch."""

import math
from typing import Any

import msgspec
import pytest

from dynamix.schemas.messages.allocation import EXACT, EXCHANGE_CODECS, LOSSY_CODECS, ROUTES, Exchange, is_permitted
from dynamix.schemas.policies import exchange_of, initial_split, option_value


def test_each_permission_includes_those_before_it() -> None:
    for codec in EXCHANGE_CODECS:
        for route in ROUTES:
            exchange = Exchange(codec=codec, route=route)
            assert is_permitted(exchange, "exact") == (codec not in LOSSY_CODECS)
            assert is_permitted(exchange, "lossy")
            assert is_permitted(exchange, "local")
            several = msgspec.structs.replace(exchange, every=2)
            assert [is_permitted(several, each) for each in ("exact", "lossy", "local")] == [False, False, True]
    assert not is_permitted(Exchange(codec="example"), "local")
    assert is_permitted(Exchange(codec="example"), "exact", ["example"])
    assert not is_permitted(Exchange(route="example"), "local")


def test_options_are_numbers_or_names() -> None:
    assert exchange_of({}) == EXACT
    written = {"every": "4", "codec": "int8", "route": "shares", "track": "1"}
    options = {name: option_value(value) for name, value in written.items()}
    assert options == {"every": 4.0, "codec": "int8", "route": "shares", "track": 1.0}
    assert exchange_of(options) == Exchange(every=4, codec="int8", route="shares")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"codec": "my_codec"}, "a name of 1 to 63 of the characters a-z, 0-9 and '-'"),
        ({"route": None}, "a name of 1 to 63 of the characters a-z, 0-9 and '-'"),
        ({"shares": (1, "x")}, "each is 0 or more, and one at least above 0"),
        ({"shares": (0.0, 0.0)}, "each is 0 or more, and one at least above 0"),
        ({"shares": (math.nan, 1.0)}, "each is 0 or more, and one at least above 0"),
        ({"every": 4, "outer_rate": 0.0}, "the rate above 0, or 0 with momentum"),
        ({"every": 4, "outer_momentum": 1.0}, "the momentum is from 0 to less than 1"),
        ({"outer_momentum": 0.9}, "of rounds of local steps: use every=2 or more with them"),
    ],
)
def test_exchanges_that_lead_nowhere_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Exchange(**given)


def test_outer_steps_count_only_with_rounds_of_local_steps() -> None:
    options = {"outer_rate": 0.7, "outer_momentum": 0.9}
    assert exchange_of(options) == EXACT
    exchange = exchange_of({"every": 4, **options})
    assert exchange == Exchange(every=4, outer_rate=0.7, outer_momentum=0.9)
    assert exchange.label == "none over all-reduce every 4 steps, outer rate 0.7 and momentum 0.9"
    assert Exchange(every=4).label == "none over all-reduce every 4 steps"


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
