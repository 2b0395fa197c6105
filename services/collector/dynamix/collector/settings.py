"""Settings of the collector: `DYNAMIX_COLLECTOR_<FIELD>` or `--field`."""

import msgspec

from .probes import WantedProbe


class CollectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which node's ranks it watches is DYNAMIX_NODE; the rest is here."""

    probe: WantedProbe = "auto"
    """Where network metrics come from; `auto` takes the best that knows the window."""
    cgroup: str = ""
    """Directory of the control group (version 2) whose sockets eBPF counts; empty: the whole hierarchy."""
    uids: tuple[int, ...] = ()
    """Users whose processes may be read; empty: everybody's that the kernel lets this process read."""
