"""The code of the pages: each ```python block runs by itself, after the script that every page assumes."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"

SCRIPT = """
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from dynamix.trainer import attach

torch.manual_seed(0)
inputs = torch.randn(256, 32)
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
sharded_model = fully_shard(nn.Linear(32, 2))
sharded_optimizer = torch.optim.SGD(sharded_model.parameters(), lr=0.1)
model, discriminator = (DistributedDataParallel(nn.Linear(32, 2)) for _ in range(2))
optimizer, optimizer_d = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, discriminator))
criterion = nn.CrossEntropyLoss()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
"""
"""A plain script up to its loop."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Where each block of code begins, and the code; of a diff that adds our lines the result."""
    for found in re.finditer(r"^```(python|diff)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        place = f"{page.relative_to(ROOT)}:{page.read_text().count(chr(10), 0, found.start()) + 1}"
        code = found[2] if found[1] == "python" else re.sub(r"^(-.*\n|.)", "", found[2], flags=re.MULTILINE)
        yield place, code


def run_page(_rank: int, page: Path, directory: str, more: str = "") -> list[str]:
    """Run the blocks of a page one by one; an attached loader that a block leaves unused is trained on."""
    os.chdir(directory)
    places = []
    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # the group is there already
    for place, code in blocks(page):
        names: dict[str, Any] = {"__name__": place, "code": code}
        exec(compile(SCRIPT + more, "the plain script", "exec"), names)
        if code.startswith("from dynamix") and "DistributedDataParallel(model)" in code:
            names["model"] = names["model"].module
        exec(compile(code, place, "exec"), names)
        session = names.get("session")
        if session is not None and session.position == 0:
            for features, targets in names["loader"] if "session, loader" in code else session.loader:
                names["optimizer"].zero_grad()
                names["criterion"](names["model"](features), targets).backward()
                names["optimizer"].step()
                session.step()
        if session is not None:
            assert session.position > 0, place
            session.close()
        places.append(place)
    return places
