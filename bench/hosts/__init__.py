"""Several hosts on one machine: network namespaces joined by a bridge, with slow links and shares of the processor."""

from .cluster import Hosts
from .errors import HostsError
from .host import Host
from .link import Link

__all__ = ["Host", "Hosts", "HostsError", "Link"]
