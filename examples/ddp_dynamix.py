"""The same script, attached: dynamix train -- --standalone --nproc-per-node 2 examples/ddp_dynamix.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

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
    session = attach(model, optimizer, dataset, local_batch_size=128, num_workers=2)
    for epoch in session.epochs(3):
        for features, targets in session.loader:
            loss = criterion(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
