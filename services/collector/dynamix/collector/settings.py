"""Settings of the collector: `DYNAMIX_COLLECTOR_<FIELD>` or `--field`."""

from typing import Literal

import msgspec


class CollectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which node's ranks it watches is DYNAMIX_NODE; the rest is here."""

    probe: Literal["auto", "tcp_info", "proc"] = "auto"
    """Where network metrics come from; `auto` takes the best that knows the window."""
    uids: tuple[int, ...] = ()
    """Users whose processes may be read; empty: everybody's that the kernel lets this process read."""
