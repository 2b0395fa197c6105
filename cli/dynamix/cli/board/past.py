"""What the streams hold of a job: its newest messages, and enough of those before them for the curves."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dynamix.runtime.bus import Bus, BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .board import Board
from .timeline import HISTORY_WINDOWS

PAST_MESSAGES = 16384
"""Messages of FEED, of all jobs, among which those of one job are read for its curves: a second at most."""
MOST_ASKED = 32
"""Running jobs that are asked whether they still send; of a broker with more the newest."""


def feed_subjects(job: str) -> list[str]:
    """Filters for what a board folds of FEED."""
    per_node = [subjects.of(kind, job, subjects.ANY) for kind in ("window", "reward")]
    return [*per_node, subjects.of("applied", job), subjects.of("event", job)]


def fold_all(board: Board, batch: list[BusMessage]) -> None:
    """Fold messages into a board; what cannot be decoded is left out, since its sender is told by the services."""
    for message in batch:
        try:
            board.fold(decode_any(message.subject, message.payload), message.timestamp_ns)
        except MalformedMessageError:
            continue


async def board_of_past(bus: Bus, job: str) -> Board:
    """A board of what is stored of a job now: the curves of its newest windows, the newest decisions."""
    board = Board(job)
    if (specification := await bus.last(JOBS.name, subjects.of("job", job))) is not None:
        fold_all(board, [specification])
    if (event := await bus.last(FEED.name, subjects.of("event", job))) is not None:
        fold_all(board, [event])
    for stream, wanted, length in (
        (FEED.name, feed_subjects(job), PAST_MESSAGES),
        (ACTIONS.name, [subjects.of("action", job)], HISTORY_WINDOWS * MOST_ASKED),
    ):
        async with aclosing(_stored(bus, stream, wanted, length)) as batches:
            async for batch in batches:
                fold_all(board, batch)
    return board


async def _stored(bus: Bus, stream: str, wanted: list[str], length: int) -> AsyncGenerator[list[BusMessage], None]:
    """What a stream holds on some subjects now, from `length` messages of any subject before the newest on."""
    newest = [await bus.last(stream, subject) for subject in wanted]
    end = max((message.sequence for message in newest if message is not None), default=0)
    if end == 0:
        return
    async with bus.consume(stream, wanted, start=max(1, end - length)) as consumer:
        async for batch in consumer:
            yield batch
            if batch[-1].sequence >= end:
                return


async def silent_jobs(bus: Bus, jobs: dict[str, Job], now_ns: int) -> set[str]:
    """Find the jobs that did not say that they ended and send nothing any more; `jobs` are by id, oldest first."""
    running = [name for name, job in jobs.items() if job.phase == "running"]
    silent = set(running[:-MOST_ASKED])
    for name in running[-MOST_ASKED:]:
        board = Board(name)
        for stream, subject in (
            (JOBS.name, subjects.of("job", name)),
            (FEED.name, subjects.of("window", name, subjects.ANY)),
        ):
            if (message := await bus.last(stream, subject)) is not None:
                fold_all(board, [message])
        if board.phase(now_ns) == "silent":
            silent.add(name)
    return silent
