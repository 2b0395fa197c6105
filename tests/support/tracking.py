"""Small jobs whose ranks divide the global batch, with compute times that are known."""

from typing import Any

import torch
from tests.support.training import Numbered, attach_numbered, distribute, make_model
from torch import nn

from dynamix.schemas.messages import Message
from dynamix.trainer import Session


def attach_tracked(data: Numbered, **options: Any) -> tuple[Session, nn.Module, Any, list[Message]]:
    """Session, model and optimizer of a job that can be divided, and what it publishes."""
    model = distribute(make_model(torch.float32))
    chosen = {"local_batch_size": 12, "min_local_batch_size": 1, "window_steps": 10} | options
    session, optimizer = attach_numbered(data, model, **chosen)
    published: list[Message] = []
    session._transport.publish = published.append  # type: ignore[method-assign]
    return session, model, optimizer, published


def hold_times(session: Session, rank: int, sample_s: float = 0.01) -> None:
    """Compute times that depend on the step alone, so that two runs can be compared."""

    def seconds_per_sample() -> float:
        step = session.step_index
        slow = (step // 20) % 2 == rank
        return (3 * sample_s if slow else sample_s) * (1 + step % 3 / 50)

    session._meter.clock.seconds_per_sample = seconds_per_sample  # type: ignore[method-assign]
