"""One replica group of a small job: prints the samples of each step, each commit, and at the end its parameters."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, ProcessGroupGloo

from dynamix.trainer import attach

NUM_SAMPLES, GLOBAL_BATCH_SIZE, RATE = 600, 48, 0.05


def made_model() -> tuple[TensorDataset, torch.nn.Module, torch.optim.Optimizer]:
    """Data, model and optimizer, alike in all groups."""
    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 8, dtype=torch.float64)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(NUM_SAMPLES))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
    return dataset, model, torch.optim.SGD(model.parameters(), RATE)


def say(facts: dict[str, Any]) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(group: str, lighthouse: str, num_epochs: str, policy: str, dies_in: str) -> None:
    """Train one group, which dies within that step among three; 0 for never."""
    num_full = 0
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has one
    dataset, model, optimizer = made_model()

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        replica_id=f"group-{group}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    data = DataLoader(dataset, batch_size=1, shuffle=True)
    options: dict[str, Any] = {"policy": policy, "global_batch": "adaptive" if policy == "rule" else "fixed"}
    options |= {"base_global_batch_size": GLOBAL_BATCH_SIZE, "learning_rate_rule": "none", "window_steps": 5}
    models = [model[:2], model[2:]] if policy == "rule" else model
    session, loader = attach(models, optimizer, data, manager=manager, noise_every=1, **options)
    for epoch in session.epochs(int(num_epochs)):
        for features, targets, indices in loader:
            attempt, sizes = [session.generation, session.step_index], session.local_batch_sizes
            say({"drawn": attempt, "epoch": epoch, "samples": indices.tolist()})  # nobody sums what was not said
            num_full += len(sizes) == 3
            if 0 < num_full == int(dies_in):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2 if len(sizes) == 2 else 0.002)  # until the third one is back
            time.sleep(0.03 + 0.001 * len(features) if policy == "rule" else 0.0)  # so that larger steps are worth it
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), targets).backward()
            if manager.should_commit():
                optimizer.step()
                say({"committed": attempt, "sizes": sizes})
    session.close()
    end = {"repeated": session.num_repeated_steps, "windows": session.window}
    end |= {"noise_windows": session.state_dict()["noise"][2]}
    say(end | {"parameters": [each.tolist() for each in model.parameters()]})
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
