"""A host's link: its rate and the queue in front of it, as `tc tbf` takes them. Pure."""

import re
from dataclasses import dataclass
from typing import Self

from .commands import HostsError

_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?bit)")

MIN_RATE = 8_000
MIN_BURST_BYTES = 4096
"""Two packets and their headers; tbf drops what is larger than the burst."""
BURST_S = 0.001
"""Burst of a fast link: tbf then wakes up a thousand times a second, not at every packet."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A slow link, the same in both directions, with a token bucket and a bounded queue at each of its ends.

    With the default queue it only takes its time: what a job of a few megabytes has in flight fits in. With 4,500 to
    10,000 bytes the queue overflows at every burst, and TCP retransmits thousands of segments.
    """

    rate: float
    """Bits per second."""
    queue_limit_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        """Raise HostsError for what tbf cannot do."""
        if self.rate < MIN_RATE:
            raise HostsError(f"a link of {self.rate:g} bit/s is below {MIN_RATE}: a packet would take seconds")
        if self.queue_limit_bytes < MIN_BURST_BYTES:
            raise HostsError(
                f"a queue of {self.queue_limit_bytes} bytes lets nothing pass: use at least {MIN_BURST_BYTES}"
            )

    @classmethod
    def parse(cls, text: str, **options: int) -> Self:
        """The link of a rate as `tc` writes it: a number and bit, kbit, mbit or gbit (powers of ten).

        Raises:
            HostsError: for anything else.
        """
        found = _RATE.fullmatch(text.strip().lower())
        if found is None:
            raise HostsError(f"{text!r} is not a rate: write a number and bit, kbit, mbit or gbit, such as 20mbit")
        return cls(rate=float(found[1]) * _UNITS[found[2]], **options)

    @property
    def burst_bytes(self) -> int:
        """What may pass at once after a pause."""
        return max(MIN_BURST_BYTES, int(self.rate / 8 * BURST_S))

    @property
    def tbf(self) -> list[str]:
        """Arguments of `tc qdisc replace ... root tbf`."""
        return [
            *("rate", f"{self.rate:.0f}bit"),
            *("burst", str(self.burst_bytes)),
            *("limit", str(self.queue_limit_bytes)),
        ]
