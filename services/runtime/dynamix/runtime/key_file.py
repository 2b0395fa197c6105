"""The file of a credential: the seed of an nkey, and in comments whose it is. `dynamix keys` writes it.

NATS's own tools read it, too: they look for the line that begins with SU.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .input_files import read_regular

MAX_KEY_FILE_BYTES = 64 * 1024
FIRST_LINE = "# DYNAMIX credential: who has it acts as its user. Keep it secret.\n"

_FIELD = re.compile(r"^# (\w+): (.*)$", re.MULTILINE)
_SEED = re.compile(r"^(SU[A-Z2-7]+)\s*$", re.MULTILINE)


class KeyFile(NamedTuple):
    """What the file says."""

    seed: str
    name: str = ""
    """The user's; empty in a file that another tool wrote."""
    inbox: str = ""
    """What follows `_INBOX` in the inbox that the user may listen to."""
    jobs: tuple[str, ...] = ()
    """The jobs that it is for; none: the file does not say."""
    api: str = ""
    """Prefix of requests to JetStream in the account that it is for; empty: the server's own."""
    consumer: str = ""
    """What the names of its durable consumers end with, which no other user knows; empty: nothing."""

    def __repr__(self) -> str:
        return f"KeyFile(name={self.name!r}, seed=***)"


def read_key_file(path: Path) -> KeyFile:
    """Read a credential. Raises OSError when it cannot be read, ValueError when it holds no seed of a user."""
    text = read_regular(path, max_bytes=MAX_KEY_FILE_BYTES).decode(errors="replace")
    seed = _SEED.search(text)
    if seed is None:
        raise ValueError("it holds no line that begins with SU, the seed of a user's nkey")
    fields = dict(_FIELD.findall(text))
    return KeyFile(
        seed=seed[1],
        name=fields.get("name", ""),
        inbox=fields.get("inbox", ""),
        jobs=tuple(fields.get("jobs", "").split()),
        api=fields.get("api", ""),
        consumer=fields.get("consumer", ""),
    )


def key_file_text(
    seed: str, *, name: str, inbox: str, jobs: Sequence[str] = (), api: str = "", consumer: str = ""
) -> str:
    """The content of a credential's file."""
    fields = {"name": name, "inbox": inbox, "jobs": " ".join(jobs), "api": api, "consumer": consumer}
    return FIRST_LINE + "".join(f"# {key}: {value}\n" for key, value in fields.items() if value) + f"{seed}\n"
