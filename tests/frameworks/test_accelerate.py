"""Accelerate: its checkpoints hold the session, and a step has the batches that the script says."""

import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import Numbered, make_model
from torch import nn
from torch.utils.data import DataLoader

from dynamix.trainer import Session

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="Accelerate is not installed: make test-frameworks"),
]


def _attached() -> tuple[Any, nn.Module, Any, Session, Any]:
    """The accelerator, model, optimizer, session and loader of an attached script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator  # noqa: PLC0415 - where it is installed

        from dynamix.trainer.frameworks.accelerate import attach  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain: DataLoader[Any] = DataLoader(Numbered(100), batch_size=16, shuffle=True)
    session, loader = attach(accelerator, model, optimizer, plain, connect=False)
    return accelerator, model, optimizer, session, loader


def _train(directory: Path, *, resume: bool, num_batches: int) -> list[int]:
    """Train from the start or from the checkpoint, and save one; the samples used."""
    accelerator, model, optimizer, session, loader = _attached()
    accelerator.register_for_checkpointing(session)
    if resume:
        accelerator.load_state(str(directory))
    used: list[int] = []
    for _, batch in zip(range(num_batches), loader, strict=False):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        session.step(loss)
        used += batch[2].tolist()
    accelerator.save_state(str(directory))
    session.close()
    return used


def test_skipping_batches_of_a_session_is_refused_with_what_to_write() -> None:
    from accelerate import skip_first_batches  # noqa: PLC0415

    _, _, _, session, loader = _attached()
    with pytest.raises(AttributeError, match=r"in place of skip_first_batches call accelerator.register_for_checkpo"):
        skip_first_batches(loader, 3)
    session.close()


def test_a_run_resumed_from_its_checkpoint_uses_what_is_left_of_the_epoch(tmp_path: Path) -> None:
    first = _train(tmp_path, resume=False, num_batches=3)
    second = _train(tmp_path, resume=True, num_batches=9)
    assert len(first) == 48
    assert Counter(first + second) == Counter(range(100))
