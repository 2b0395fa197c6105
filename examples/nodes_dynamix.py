"""Several ranks per node: one exchange per node goes over the link, compressed, every few steps.

On each node: torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
    examples/nodes_dynamix.py
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix.trainer import attach

OPTIONS = {"track": 1.0, "codec": "int8", "every": 4.0}
"""Fixed here; the policy `rule` decides them from measured times (needs `dynamix up`)."""


def main() -> None:
    """Train a small classifier on made-up data."""
    logging.basicConfig(level=logging.INFO)  # tells whether the node level pays here
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(20_000, 32)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=128, sampler=sampler, num_workers=2)
    session, loader = attach(model, optimizer, loader, exchange="local", policy="static", policy_options=OPTIONS)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, targets in loader:
            loss = criterion(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
