"""The same script, attached: torchrun --standalone --nproc-per-node 2 examples/ddp_dynamix.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dynamix.trainer import attach


def main() -> None:
    """Train a small classifier on made-up data."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(20_000, 32)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=128, sampler=sampler, num_workers=2)
    session, loader = attach(model, optimizer, loader)
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
