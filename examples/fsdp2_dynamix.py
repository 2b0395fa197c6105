"""The same script, attached: torchrun --standalone --nproc-per-node 2 examples/fsdp2_dynamix.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix.trainer import attach


def main() -> nn.Module:
    """Train a small classifier on made-up data."""
    torch.manual_seed(0)
    inputs = torch.randn(12_288, 32)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=128, sampler=sampler)
    session, loader = attach(model, optimizer, loader)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, targets in loader:
            loss = nn.functional.cross_entropy(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
