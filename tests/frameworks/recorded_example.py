"""The ranks of an example, plain and then attached; each writes down what it used and what came of it.

python -m tests.frameworks.recorded_example PACKAGE NAME DIRECTORY
"""

import importlib
import importlib.util
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ("plain", "dynamix")
WORLD_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
NUM_SAMPLES = 12_288
SLOWDOWN_S = 1e-4
"""Per sample, of rank 1."""
_kept: list[nn.Module] = []
"""Models live as long as their process: when DDP's reducer is the last to hold a group of gloo, torch 2.13 waits in the
group's destructor, with the GIL, for a thread of the group that may be waiting for the GIL to forget its last work."""


def num_ranks_of(name: str) -> int:
    """The ranks of an example: two, or two nodes of two."""
    return 4 if name == "hsdp" else 2


def record(path: Path, *, slow: bool) -> dict[str, Any]:
    """Run an example's `main`; its training data are the `TensorDataset` of `NUM_SAMPLES`."""
    used: list[int] = []
    read = TensorDataset.__getitem__

    def read_and_record(dataset: TensorDataset, index: int) -> Any:
        if len(dataset) == NUM_SAMPLES:
            used.append(index)
        return read(dataset, index)

    def delay(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.ReLU) and module.training and slow and os.environ["RANK"] == "1":
            time.sleep(SLOWDOWN_S * len(inputs[0]))

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    handle = nn.modules.module.register_module_forward_pre_hook(delay)
    TensorDataset.__getitem__ = read_and_record  # type: ignore[method-assign]
    if "accelerate" in sys.modules:  # a test before, in the process that this one was forked from, may have begun it
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        model = example.main()
        _kept.append(model)
    finally:
        TensorDataset.__getitem__ = read  # type: ignore[method-assign]
        handle.remove()
    layers = next(module for module in model.modules() if isinstance(module, nn.Sequential)).eval()
    return {"used": used, "parameters": _flat(layers), "accuracy": _accuracy(layers)}


def _flat(layers: nn.Module) -> torch.Tensor:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in layers.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])


@torch.no_grad()
def _accuracy(layers: nn.Module) -> float:
    inputs = torch.randn(4000, 32, generator=torch.Generator().manual_seed(1))
    return float((layers(inputs).argmax(1) == (inputs.sum(1) > 0)).float().mean())


def _write(kind: str, name: str, directory: Path, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    if name in ("fsdp2", "hsdp"):
        dist.init_process_group("gloo")
    found = record(EXAMPLES / f"{name}_{kind}.py", slow=kind == "dynamix")
    torch.save(found, directory / f"{kind}{environ['RANK']}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(kind: str, name: str, directory: Path) -> bool:
    """Run the ranks of a script with the environment that torchrun gives them; whether all came to their end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    num_ranks = f"{num_ranks_of(name)}"
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"} | dict.fromkeys(WORLD_SIZES, num_ranks)
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in map(str, range(int(num_ranks))):
        environ = {**world, "TORCHELASTIC_RUN_ID": kind, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
        ranks.append(fork.Process(target=_write, args=(kind, name, directory, environ), daemon=True))
        ranks[-1].start()
    running: dict[Any, multiprocessing.process.BaseProcess] = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = [running.pop(sentinel) for sentinel in wait(list(running))]
        for rank in ended:
            rank.join()
        if any(rank.exitcode for rank in ended):
            break
    for rank in running.values():
        rank.kill()  # it would wait for the failed one for ever
        rank.join()
    return all(rank.exitcode == 0 for rank in ranks)


if __name__ == "__main__":
    package, name, directory = sys.argv[1:]
    importlib.import_module(package)  # once; what is forked has it
    sys.exit(not all(_run(kind, name, Path(directory)) for kind in KINDS))
