"""Whom the collector believes: it may run as root, and a report names any pid its sender likes."""

from collections.abc import Collection

from dynamix.schemas.messages import RankRow

from .proc import Proc


def reason_to_refuse(row: RankRow, proc: Proc, uids: Collection[int]) -> str | None:
    """Why the process that a row names is not read, or `None` when it is what the row says.

    The pid must exist here, with the start time, pid namespace and user that the rank reported of itself; where `uids`
    is not empty, only those users' processes are read at all.
    """
    try:
        if proc.stat(row.pid).start_ticks != row.pid_start_ticks:
            return f"pid {row.pid} belongs to another process now"
        if proc.pid_namespace(row.pid) != row.pid_namespace:
            return f"pid {row.pid} counts in another pid namespace: run the collector in the ranks' namespace"
        uid = proc.uid(row.pid)
    except OSError:
        return f"pid {row.pid} is not running here, or hidden from this collector (hidepid)"
    if uid != row.uid:
        return f"pid {row.pid} belongs to uid {uid}, not to {row.uid}"
    if uids and uid not in uids:
        return f"uid {uid} is not among the users this collector serves: see DYNAMIX_COLLECTOR_UIDS"
    return None
