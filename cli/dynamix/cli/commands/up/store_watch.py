"""Sees that the broker stores nothing, and has it started again once its disk has room.

After a full disk nats-server answers nothing until it is started again, also when there is room by then: connections
stay open, services beat, and no decision is stored. The services say what is not stored in their heartbeats.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dynamix.cli.services import UNANSWERED, Heartbeats, hear
from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import EmbeddedServer, EmbeddedServerError
from dynamix.schemas.messages import Live

PATIENCE_S = 10.0
"""Nothing was stored for so long: longer than a restart of the broker takes."""
AGAIN_AFTER_S = 60.0
"""Between two restarts, or two complaints: the services need some time to recover."""
MIN_ROOM_BYTES = 16 << 20
"""Twice the largest block that a stream begins with."""

Verdict = Literal["restart", "full", ""]


class StoreJudge:
    """Decides what to do about a broker that stores nothing. Pure: told numbers and the time."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._acted_s: float | None = None
        self._was_full = False

    def judge(self, num_unanswered: int, free_bytes: int, now_s: float) -> Verdict:
        """Decide what to do, at most every `AGAIN_AFTER_S`: nothing while all is stored, or for less than `PATIENCE_S`.

        Once a full disk has room, the restart is due at once.
        """
        if not num_unanswered:
            self._since_s = None
            return ""
        self._since_s = now_s if self._since_s is None else self._since_s
        has_room = free_bytes >= MIN_ROOM_BYTES
        acts_again = self._acted_s is None or now_s - self._acted_s >= AGAIN_AFTER_S or (self._was_full and has_room)
        if now_s - self._since_s < PATIENCE_S or not acts_again:
            return ""
        self._acted_s, self._was_full = now_s, not has_room
        return "restart" if has_room else "full"


async def watch_store(bus: Bus, server: EmbeddedServer, store: Path, say: Callable[[str, str], None]) -> None:
    """Listen to heartbeats until cancelled; a broker that is ended here is started again by its supervisor."""
    judge, heartbeats, time_s = StoreJudge(), Heartbeats(), asyncio.get_running_loop().time

    def observe(beat: Live) -> None:
        heartbeats.record(beat, time_s())
        num_unanswered = heartbeats.count(*UNANSWERED, now_s=time_s())
        free_bytes = _free_bytes(store)
        what = f"it has not answered {num_unanswered} messages or requests for {PATIENCE_S:g} s"
        match judge.judge(num_unanswered, free_bytes, time_s()):
            case "restart":
                say("broker", f"{what}, and there is room: starting it again")
                with contextlib.suppress(ProcessLookupError, EmbeddedServerError):  # it ends already
                    os.kill(server.pid, signal.SIGTERM)
            case "full":
                say("broker", f"{what}: {store} has {free_bytes >> 20} MiB left, make room; it is then started again")
            case "":
                pass

    await hear(bus, observe)


def _free_bytes(store: Path) -> int:
    """Room on the store's disk; 0 where there is no store any more."""
    try:
        return shutil.disk_usage(store).free
    except OSError:
        return 0
