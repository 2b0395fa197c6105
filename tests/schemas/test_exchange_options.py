"""Exchanges as people write them, and what a job permits."""

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
    option_number,
)


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
    assert not is_permitted(Exchange(route="example"), "local")


def test_numbers_of_options_have_names() -> None:
    assert exchange_of({}) == EXACT
    written = {"every": "4", "codec": "int8", "route": "shares", "track": "1"}
    options = {name: option_number(name, value) for name, value in written.items()}
    assert options == {"every": 4.0, "codec": 5.0, "route": 1.0, "track": 1.0}
    assert exchange_of(options) == Exchange(every=4, codec="int8", route="shares")
    assert option_number("codec", 3) == 3.0
    with pytest.raises(ValueError, match="option route='ring' is not a number, nor one of all-reduce, shares"):
        option_number("route", "ring")
    with pytest.raises(ValueError, match=r"option track='on' is not a number$"):
        option_number("track", "on")


@pytest.mark.parametrize("shares", [(0.0, 0.0), (1.0, -0.5), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_shares_that_divide_nothing_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="each is 0 or more, and one at least above 0"):
        Exchange(shares=shares)
