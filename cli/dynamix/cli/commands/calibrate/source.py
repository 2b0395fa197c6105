"""A job's metric windows and specification: from a capture, or as the bus keeps them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dynamix.cli.errors import CommandError, explained, reading
from dynamix.cli.jobs import find_job
from dynamix.recording.capture import CaptureError, CutOffError, records
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Job, Message, MetricWindow
from dynamix.schemas.streams import FEED


class CalibrationInput(NamedTuple):
    """What calibration needs of a job."""

    job: Job | None
    """Its newest specification."""
    windows: list[MetricWindow]


def from_capture(path: Path) -> CalibrationInput:
    """What a capture holds; of one that is cut off, what is there.

    Raises:
        CommandError: when it cannot be read, or holds what cannot be decoded.
    """
    found: list[Message] = []
    with reading(path), explained(CaptureError):
        try:
            for record in records(path):
                if subjects.parse(record.subject).kind in ("job", "window"):
                    found.append(decode_any(record.subject, record.payload))  # noqa: PERF401 - what came before an error counts
        except CutOffError as error:
            print(f"{error}; going on with them", file=sys.stderr)
        except CaptureError:
            raise
        except ValueError as error:  # of a subject or a message
            raise CommandError(f"{path} holds what cannot be decoded: {error}") from error
    return _sorted_out(found)


async def from_bus(bus: Bus, wanted: str) -> CalibrationInput:
    """What the bus keeps now of the job with the id `wanted`, or whose id begins so if that is one job.

    Raises:
        CommandError: when there is no such job, or none of its windows are kept, or one cannot be decoded.
    """
    job = await find_job(bus, wanted)
    subject = subjects.of("window", job.job, subjects.ANY)
    if await bus.last(FEED.name, subject) is None:
        raise CommandError(
            f"no metric window of {job.job} is kept: a collector must run beside the job (`dynamix up`), and FEED "
            f"keeps {FEED.max_age_s / 3600:g} hours"
        )
    found: list[Message] = [job]
    async with bus.consume(FEED.name, [subject], start="all") as consumer:
        async for batch in consumer:
            try:
                found += [decode_any(message.subject, message.payload) for message in batch]
            except MalformedMessageError as error:
                raise CommandError(f"the bus keeps of {job.job} what cannot be decoded: {error}") from error
            if batch[-1].num_pending == 0:
                break
    return _sorted_out(found)


def _sorted_out(messages: Sequence[Message]) -> CalibrationInput:
    jobs = [message for message in messages if isinstance(message, Job)]
    windows = [message for message in messages if isinstance(message, MetricWindow)]
    return CalibrationInput(jobs[-1] if jobs else None, windows)
