"""A training script for fault tests: two ranks, a small model, steps of about 20 ms, a checkpoint every 10 steps.

Run under torchrun: steady_job.py DIRECTORY NUM_EPOCHS. Each rank appends a JSON line per step to rank-N.jsonl there.
The job ends after an epoch when there is a file `stop`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dynamix import trainer as dynamix

NUM_SAMPLES = 6000
CHECKPOINT_EVERY = 10


def main(directory: Path, num_epochs: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    indices = torch.arange(NUM_SAMPLES)  # each sample has its own
    data = TensorDataset(torch.stack([indices / NUM_SAMPLES, torch.ones(NUM_SAMPLES)], dim=1), indices)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = dynamix.attach(
        model,
        optimizer,
        data,
        local_batch_size=16,
        min_local_batch_size=4,
        max_local_batch_size=64,
        window_steps=10,
        global_batch="adaptive",
        policy="random",
    )
    checkpoint = directory / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
    with (directory / f"rank-{rank}.jsonl").open("a", buffering=1) as log, session:
        for epoch in session.epochs(num_epochs):
            for inputs, indices in session.loader:
                step = session.step_index
                loss = torch.nn.functional.cross_entropy(model(inputs), indices % 2)
                optimizer.zero_grad()
                time.sleep(0.02)
                loss.backward()
                optimizer.step()
                line: dict[str, Any] = {
                    "pid": os.getpid(),
                    "generation": session.generation,
                    "epoch": epoch,
                    "step": step,
                    "sizes": session.local_batch_sizes,
                    "indices": indices.tolist()[: session.num_samples],
                }
                session.step(loss)
                log.write(json.dumps(line) + "\n")
                if session.step_index % CHECKPOINT_EVERY == 0:
                    state = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "session": session.state_dict(),
                    }
                    if rank == 0:
                        torch.save(state, checkpoint.with_suffix(".new"))
                        checkpoint.with_suffix(".new").replace(checkpoint)
            stop = torch.tensor(int((directory / "stop").exists()))
            dist.all_reduce(stop)
            if stop:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
