"""Exchanges as people write them, and what a job permits."""

from typing import Any

import msgspec
import pytest

from dynamix.schemas.messages.allocation import (
    EXACT,
    EXCHANGE_CODECS,
    LOSSY_CODECS,
    ROUTES,
    Exchange,
    exchange_of,
    is_permitted,
)
from dynamix.schemas.messages.policy_options import option_value


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


@pytest.mark.parametrize("name", ["Upper", "my_codec", "", 5, None])
def test_names_are_those_that_messages_can_hold(name: Any) -> None:
    for given in ({"codec": name}, {"route": name}):
        with pytest.raises(ValueError, match="a name of 1 to 63 of the characters a-z, 0-9 and '-'"):
            Exchange(**given)


@pytest.mark.parametrize("shares", [(1, "x"), (0.0, 0.0), (1.0, -0.5), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_shares_that_divide_nothing_are_refused(shares: Any) -> None:
    with pytest.raises(ValueError, match="each is 0 or more, and one at least above 0"):
        Exchange(shares=shares)


@pytest.mark.parametrize(("rate", "momentum"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_outer_steps_that_lead_nowhere_are_refused(rate: float, momentum: float) -> None:
    with pytest.raises(ValueError, match="the rate is above 0, the momentum from 0 to less than 1"):
        Exchange(every=4, outer_rate=rate, outer_momentum=momentum)


def test_an_outer_step_needs_a_round_of_local_ones() -> None:
    with pytest.raises(ValueError, match="of rounds of local steps: use every=2 or more with them"):
        Exchange(outer_momentum=0.9)
    options = {"outer_rate": 0.7, "outer_momentum": 0.9}
    assert exchange_of(options) == EXACT
    exchange = exchange_of({"every": 4, **options})
    assert exchange == Exchange(every=4, outer_rate=0.7, outer_momentum=0.9)
    assert exchange.label == "none over all-reduce every 4 steps, outer rate 0.7 and momentum 0.9"
    assert Exchange(every=4).label == "none over all-reduce every 4 steps"
