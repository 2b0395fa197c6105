"""Replica groups that come and go under torchft 0.2, with one global batch and each sample once per epoch.

    torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000 --heartbeat_timeout_ms 1500 --bind 0.0.0.0:29510 &
    export TORCHFT_LIGHTHOUSE=http://HOST:29510
    GROUP=0 torchrun --standalone --nproc-per-node 1 --max-restarts 10 examples/torchft_groups.py   # one per group

No session: DYNAMIX cannot change the number of its ranks without a restart. What a step needs lies in `Progress`, which
a group that joins gets with the model: the place in the epoch's order, and the speeds. A step that fails is repeated by
the groups that are left, with the same samples.
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchft import Manager, Optimizer, ProcessGroupGloo

from dynamix.schemas.apportion import apportion

NUM_EPOCHS, GLOBAL_BATCH_SIZE, SMOOTHING = int(os.environ.get("EPOCHS", "3")), 384, 0.3
TIMEOUT = timedelta(seconds=10)


class Progress:
    """Which samples are next, and who takes how many of them; the same in all groups."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.epoch, self.offset = 0, 0
        self.seconds: list[float] = []
        """Compute time per sample of each group that takes part; empty where it is not known."""

    def part_of(self, group: int, num_groups: int) -> tuple[list[int], int]:
        """The samples of one group in this step, and their number over all groups."""
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.num_samples, generator=generator)
        step = order[self.offset : self.offset + GLOBAL_BATCH_SIZE].tolist()
        if len(self.seconds) != num_groups:
            self.seconds = [1.0] * num_groups
        sizes = apportion(len(step), [1 / each for each in self.seconds], [1] * num_groups, [len(step)] * num_groups)
        start = sum(sizes[:group])
        return step[start : start + sizes[group]], len(step)

    def advance(self, num_samples: int, seconds: list[float]) -> None:
        """Count a step that was committed."""
        self.seconds = [(1 - SMOOTHING) * old + SMOOTHING * new for old, new in zip(self.seconds, seconds, strict=True)]
        self.offset += num_samples
        if self.offset == self.num_samples:
            self.epoch, self.offset = self.epoch + 1, 0


def main() -> None:
    """Train a small classifier on made-up data."""
    torch.manual_seed(0)
    inputs = torch.randn(20_000, 32)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    progress = Progress(len(dataset))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict(), "progress": vars(progress)}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["optimizer"])
        vars(progress).update(saved["progress"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        use_async_quorum=False,  # who takes part must be known before the samples are chosen
        timeout=TIMEOUT,
        replica_id=f"group-{os.environ['GROUP']}",
    )
    optimizer = Optimizer(manager, sgd)
    while progress.epoch < NUM_EPOCHS:
        optimizer.zero_grad()  # waits for the quorum; a group that joins has its state now
        group, num_groups = manager.participating_rank(), manager.num_participants()
        assert group is not None, "with a synchronous quorum every group takes part"
        before, mine, total = manager.current_step(), *progress.part_of(group, num_groups)
        began = time.perf_counter()
        features, targets = dataset[mine]
        loss = nn.functional.cross_entropy(model(features), targets)
        (loss * (len(mine) * num_groups / total)).backward()  # the manager averages over groups
        seconds = torch.zeros(num_groups)
        seconds[group] = (time.perf_counter() - began) / len(mine) * num_groups
        # not torchft's DDP: in 0.2 its hook raises in the groups that are left when one dies
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        flat = torch.cat([*(each.flatten() for each in gradients), seconds])
        manager.allreduce(flat).wait()
        *parts, seconds = torch.split(flat, [*(each.numel() for each in gradients), num_groups])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        if manager.current_step() > before:  # committed
            print(f"GROUP {os.environ['GROUP']} epoch {progress.epoch} samples {' '.join(map(str, mine))}", flush=True)
            progress.advance(total, seconds.tolist())
    manager.shutdown()


if __name__ == "__main__":
    main()
