"""Replica groups that come and go under torchft 0.2, with one global batch and each sample once per epoch.

torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000 --heartbeat_timeout_ms 1500 --bind 0.0.0.0:29510 &
export TORCHFT_LIGHTHOUSE=http://HOST:29510
GROUP=0 torchrun --standalone --nproc-per-node 1 --max-restarts 10 examples/torchft_groups.py   # one per group
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, ProcessGroupGloo

from dynamix.trainer import attach

TIMEOUT = timedelta(seconds=10)


def main() -> None:
    """Train a small classifier on made-up data."""
    torch.manual_seed(0)
    inputs = torch.randn(20_000, 32)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(len(inputs)))
    loader = DataLoader(dataset, batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        use_async_quorum=False,  # who takes part must be known before the samples are drawn
        timeout=TIMEOUT,
        replica_id=f"group-{os.environ['GROUP']}",
    )
    session, loader = attach(model, optimizer, loader, manager=manager, base_global_batch_size=384)
    for epoch in session.epochs(int(os.environ.get("EPOCHS", "3"))):  # a group that joins begins where the others are
        for features, targets, indices in loader:  # asks torchft for a quorum before the samples of a step are drawn
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()  # sums over the groups at its end
            if manager.should_commit():  # else the same samples come again, in the groups that are left
                optimizer.step()
                print(f"GROUP {os.environ['GROUP']} epoch {epoch} samples {' '.join(map(str, indices.tolist()))}")
    manager.shutdown()


if __name__ == "__main__":
    main()
