"""Ranks that end as a script does, through the interpreter's own end: `python -m tests.support.finishing PAIRS`.

So many pairs for each way, forked from this process, which has imported torch; it prints their exit codes. For
the last step all threads but the training thread get only what that leaves of one processor: whatever they still have
to do once the last collective is done, they do when the process waits for them, or not before its end.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # what a DDP model would import, in every pair
import torch.distributed as dist
from tests.support.training import Numbered, distribute, make_model
from torch import nn

from dynamix import trainer as dynamix

NUM_RANKS = 2
NUM_STEPS = 4


def closes(session: dynamix.Session) -> None:
    """Close the session, then end as the examples do."""
    session.close()
    dist.destroy_process_group()


def destroys(_session: dynamix.Session) -> None:
    """End as the examples do."""
    dist.destroy_process_group()


def leaves(_session: dynamix.Session) -> None:
    """Nothing is closed or destroyed."""


def fails(_session: dynamix.Session) -> None:
    """An error that is not caught."""
    raise RuntimeError("the script's own")


ENDS: dict[str, Callable[[dynamix.Session], None]] = {end.__name__: end for end in (closes, destroys, leaves, fails)}


def train(end: Callable[[dynamix.Session], None]) -> None:
    """A few steps; `end` follows right after the last one, whose rows and decision are taken as the epoch ends."""
    data = Numbered(NUM_STEPS * 64)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = dynamix.attach(model, optimizer, data, local_batch_size=32, window_steps=1, connect=False)
    for _ in session.epochs(1):
        for inputs, targets, _ in session.loader:
            if session.position + session.global_batch_size == len(data):
                hold_back_other_threads()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(loss)
    end(session)


def hold_back_other_threads() -> None:
    """Let them run only while this thread waits."""
    processors = sorted(os.sched_getaffinity(0))
    mine = processors[dist.get_rank() % len(processors)]
    for thread in [int(task.name) for task in Path("/proc/self/task").iterdir()]:
        os.sched_setaffinity(thread, {mine})
        if thread != os.getpid():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Fork the pairs; a rank trains and falls out of the script."""
    codes: dict[str, list[int]] = {how: [] for how in ENDS}
    torch.set_num_threads(1)
    directory = tempfile.mkdtemp()
    for pair, how in enumerate(list(ENDS) * int(sys.argv[1])):
        children = []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                meeting = f"file://{directory}/{pair}"
                dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
                train(ENDS[how])
                return
            children.append(child)
        codes[how] += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    shutil.rmtree(directory)
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    main()
