"""Breaking a process group: everything that waits in it, in this process and in the others, gets an error at once.

A process that ends closes its connections; one that goes on without its part of a collective must close them itself,
or the others wait for it until their time-out, half an hour by default. Gloo has no call for that (`abort` and
`shutdown` of its groups do nothing, torch 2.13), but a receive that times out closes all connections of its group.
"""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from .lent_tensors import LentTensor

UNUSED_TAG = 2
"""Nothing is ever sent with it."""
MOMENT = timedelta(milliseconds=1)


def break_group(group: dist.ProcessGroup) -> None:
    """Close the connections of a gloo group, which is of no use any more; what waits in it raises RuntimeError."""
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        lent = LentTensor(torch.empty(1))
        with contextlib.suppress(RuntimeError):  # the time-out, or a connection to this peer that was closed already
            group.recv([lent.alias], peer, UNUSED_TAG).wait(MOMENT)
