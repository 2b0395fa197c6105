"""Several hosts on one machine: network namespaces joined by a bridge, with slow links and shares of the processor.

`cluster` makes and removes them all, `host` is one of them, made of a `namespace`, a `link` and `cgroups`; `commands`
runs ip, tc and nsenter. `names` tells whose namespaces and cgroups are whose, so that the `janitor`, a second process,
removes those of a dead owner (`removal`). In: how many hosts, rates, cores. Out: processes that run there, counters.
Only root can make hosts; nothing of the machine's own network is changed, and nothing may be left after any exit.
"""

from .cluster import Hosts
from .commands import HostsError
from .host import Host
from .link import Link

__all__ = ["Host", "Hosts", "HostsError", "Link"]
