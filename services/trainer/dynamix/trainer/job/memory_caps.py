"""Upper bounds that a rank keeps after running out of memory."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from dynamix.runtime import output_files

CAP_FACTOR = 0.8
"""A rank that ran out of memory gets at most this share of the size it failed at."""

_log = logging.getLogger("dynamix.trainer")


class MemoryCaps:
    """Upper bounds by rank, in one small file per rank: `<path>.rank<r>.json`.

    A rank writes only its own, when it dies of a lack of memory; all ranks read what they can see, and the lowest
    bound holds for all when they attach again.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> dict[int, int]:
        """The bounds that can be seen from here."""
        if self._path is None:
            return {}
        caps: dict[int, int] = {}
        for file in self._path.parent.glob(f"{self._path.name}.rank*.json"):
            try:
                content = json.loads(file.read_text())
                caps[int(content["rank"])] = int(content["max_local_batch_size"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("%s holds no memory cap (%s): delete it", file, error)
        return caps

    def lower(self, rank: int, failed_size: int, minimum: int) -> int | None:
        """Write a rank's new bound after it ran out of memory at `failed_size`; returns it, `None` without a path."""
        cap = max(minimum, int(failed_size * CAP_FACTOR), 1)
        if self._path is None:
            return None
        file = self._path.with_name(f"{self._path.name}.rank{rank}.json")
        content = json.dumps({"rank": rank, "max_local_batch_size": cap, "failed_at": failed_size}) + "\n"
        output_files.write(file, content.encode(), make_parents=True)
        return cap


def merge_caps(per_rank: Iterable[Mapping[int, int]], world_size: int, maximum: int, minimum: int) -> tuple[int, ...]:
    """Upper bound of every rank: the lowest that any rank knows, between the job's bounds."""
    caps = [maximum] * world_size
    for known in per_rank:
        for rank, cap in known.items():
            if rank < world_size:
                caps[rank] = max(min(caps[rank], cap), minimum)
    return tuple(caps)
