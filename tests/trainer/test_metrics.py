"""What a job's metrics say of its decisions and rewards: with a broker, without one, in rank 0 and in others."""

import asyncio
import time
from typing import Any

import torch
from tests.support.brokers import ConfiguredServer
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, gather, make_model
from torch import nn

from dynamix import trainer as dynamix
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode, encode
from dynamix.schemas.messages import Action, RankReward, Report, Reward
from dynamix.trainer import Session
from dynamix.trainer.loggers import Metrics

WINDOW_STEPS = 4
SIZES = (3, 21)


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, Metrics]] = []

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.windows.append((step, metrics))

    def close(self) -> None:
        """Nothing is open."""


def _attach(loggers: list[Kept], **options: Any) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    model = distribute(make_model(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = dynamix.attach(
        model, optimizer, Numbered(480, torch.float32), local_batch_size=8, min_local_batch_size=2,
        max_local_batch_size=64, window_steps=WINDOW_STEPS, max_lag_windows=1000, global_batch="adaptive",
        policy="proportional", loggers=loggers, **options,
    )  # fmt: skip
    return session, model, optimizer


def _step(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    session.step(loss)


def _train_until_rewarded(_rank: int) -> tuple[list[dict[str, Any]], list[tuple[int, Metrics]]]:
    """The metrics once a window that an action rules has its reward, and what was logged by then."""
    logger = Kept()
    session, model, optimizer = _attach([logger])
    with session:
        for _ in session.epochs(1000):
            for batch in session.loader:
                _step(session, model, optimizer, batch)
                time.sleep(0.002)  # leaves the cores to the broker
                rows = session.metrics()
                is_rewarded = any("reward/mean" in row and row.get("decision") == "adopted" for row in rows[:-1])
                if any(gather(is_rewarded)):
                    session.close()
                    return rows, logger.windows
    raise AssertionError("no reward came")


async def _decide_and_reward(bus: Bus) -> None:
    """Answer each report with an action, the first of which must be refused, and with a reward."""
    async with bus.consume("REPORTS", [subjects.of("report", "*", "*")], start="all", durable="d") as reports:
        async for batch in reports:
            for message in batch:
                report = decode(Report, message.subject, message.payload)
                where = {"job": report.job, "generation": report.generation, "window": report.window}
                sizes = SIZES if report.window > 1 else (1, 1)
                action = Action(
                    **where,
                    local_batch_sizes=sizes,
                    deltas=(0, 0),
                    policy="proportional",
                    policy_version=1,
                    watermark=0,
                )
                action = seal(action, b"")
                await bus.publish_bytes(subjects.of("action", report.job), encode(action), f"action:{report.window}")
                ranks = tuple(RankReward(rank=rank, reward=0.5 + rank, terms={"size": -0.25}) for rank in range(2))
                await bus.publish(Reward(**where, node="node-a", formula="paper-sgd", ranks=ranks))


async def test_rewards_and_decisions_come_over_the_bus(server: ConfiguredServer, bus: Bus) -> None:
    answering = asyncio.create_task(_decide_and_reward(bus))
    environ = {
        "DYNAMIX_NATS_URL": server.settings.url, "DYNAMIX_NATS_USER": server.settings.user,
        "DYNAMIX_NATS_PASSWORD": server.settings.password, "DYNAMIX_NODE": "node-a",
    }  # fmt: skip
    (rows, logged), (others, nothing) = await asyncio.to_thread(run_ranks, _train_until_rewarded, 2, environ=environ)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)

    refused = [row for row in rows if row["decision"] == "refused"]
    assert refused
    assert refused[0]["reason"].endswith("was refused: a size is outside the bounds of the job or of a rank's memory")
    rewarded = next(row for row in rows if row["decision"] == "adopted" and "reward/mean" in row)
    assert (rewarded["reward/mean"], rewarded["reward/size"]) == (1.0, -0.25)
    assert rewarded["policy"] == "proportional"
    assert rewarded["decided_window"] < rewarded["window"]
    assert rewarded["reason"] == (
        f"policy proportional decided {sum(SIZES)} samples per step on window {rewarded['decided_window']}"
    )
    assert (rewarded["local_batch_size/rank_0"], rewarded["local_batch_size/rank_1"]) == SIZES

    assert [step for step, _ in logged] == [row["step"] for row in rows]
    assert logged[rewarded["window"]][1]["reason"] == rewarded["reason"]
    assert nothing == []
    assert [row["window"] for row in others] == [row["window"] for row in rows]
    assert not any(name.startswith(("reward", "decision", "reason")) for row in others for name in row)
