"""Several hosts on one machine: network namespaces joined by a bridge, with slow links and shares of the processor.

`cluster` makes and removes them all, `host` is one of them, made of a `namespace`, a link and `cgroups`. `removal`
tells by names whose namespaces and cgroups are whose, so that the `janitor`, a second process, removes those of a dead
owner. `services` runs broker, reward and arbitrator beside them and a collector on each. In: how many hosts, rates,
cores. Out: processes that run there, counters.
Only root can make hosts; nothing of the machine's own network is changed, and nothing may be left after any exit.
"""

from .cluster import Hosts
from .host import Host, Link
from .namespace import HostsError

__all__ = ["Host", "Hosts", "HostsError", "Link"]
