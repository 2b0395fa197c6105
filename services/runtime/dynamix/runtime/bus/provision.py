"""Creates the streams of the table in `dynamix.schemas.streams`. Only an operator's user may; no service does."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dynamix.schemas.streams import STREAMS, Stream
from dynamix.schemas.subjects import ROOT, announced, kept_by

from . import Bus
from .errors import ApiError, BusError, StreamMissingError


async def provision(bus: Bus, streams: Sequence[Stream] = STREAMS, *, num_replicas: int | None = None) -> list[str]:
    """Create or update the streams; returns what was done, one line per stream. Running it twice does nothing new.

    Other streams are left alone. `num_replicas` are the copies in a cluster; `None` keeps what is, and makes new
    streams with one. Raises BusError, with the fix, when JetStream cannot change an existing stream as wanted.
    """
    done, everything = [], f"{ROOT}.>"
    for stream in streams:
        # sent again when it is stored: whole messages, or headers only, which say what there is
        republish = {"src": everything, "dest": announced(everything)} | (
            {} if stream.announces else {"headers_only": True}
        )
        wanted: dict[str, Any] = {
            "name": stream.name,
            "subjects": kept_by(stream),
            "republish": republish if stream.announces or stream.hints else None,
            "retention": "limits",
            "storage": "file",
            "discard": stream.discard,
            "max_age": int(stream.max_age_s * 1e9),
            "max_bytes": stream.max_bytes,
            "max_msgs_per_subject": stream.max_messages_per_subject,
            "max_msg_size": stream.max_message_bytes,
            "duplicate_window": int(stream.duplicate_window_s * 1e9),
            "deny_delete": stream.deny_delete,
            "deny_purge": stream.deny_delete,
            "allow_direct": True,
            **({} if num_replicas is None else {"num_replicas": num_replicas}),
        }
        try:
            present = await bus.requests.stream_config(stream.name)
        except StreamMissingError:
            await bus.requests.write_stream("CREATE", {"num_replicas": 1, **wanted})
            done.append(f"{stream.name}: created")
            continue
        # JetStream leaves out what is false or zero
        changes = {key: value for key, value in wanted.items() if (present.get(key) or None) != (value or None)}
        if not changes:
            done.append(f"{stream.name}: unchanged")
            continue
        try:
            await bus.requests.write_stream("UPDATE", {**present, **wanted})
        except ApiError as error:
            raise BusError(
                f"stream {stream.name} cannot be made as wanted: {error}. "
                "What JetStream never changes (storage, retention, a ban on deleting) needs a new stream: "
                "back it up and delete it, or keep the old setting"
            ) from error
        shown = (f"{key} {json.dumps(present.get(key))} -> {json.dumps(value)}" for key, value in changes.items())
        done.append(f"{stream.name}: updated {', '.join(shown)}")
    return done


async def push_accounts(bus: Bus, jwts: Iterable[str]) -> None:
    """Give the running broker the accounts' JWTs, as a user of its system account. Raises BusError when it refuses."""
    for jwt in jwts:
        answer = json.loads(await bus.requests.ask_server("$SYS.REQ.CLAIMS.UPDATE", jwt.encode()))
        if "error" in answer:
            raise BusError(f"the broker refuses an account: {answer['error'].get('description')}")
