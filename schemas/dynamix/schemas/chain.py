"""The chain of actions: each carries a hash over itself and its predecessor's hash."""

import hashlib
from typing import Any

import msgspec

from .codec import HEADER_BYTES, encode
from .messages import Action

_HASH = Action.__struct_fields__.index("hash")


class BrokenChainError(ValueError):
    """Changed, missing or reordered actions; the message names the window."""


def seal(action: Action, previous_hash: bytes) -> Action:
    """The action with its place in the chain: SHA-256 over its encoded bytes with an empty `hash`."""
    open_action = msgspec.structs.replace(action, previous_hash=previous_hash, hash=b"")
    return msgspec.structs.replace(open_action, hash=hashlib.sha256(encode(open_action)).digest())


def is_intact(payload: bytes) -> bool:
    """Whether the hash in an encoded action is that of its bytes.

    It holds for the bytes as they are, also those of another version with fewer or more fields at the end. Decoding and
    encoding them again would give other bytes.
    """
    try:
        fields: Any = msgspec.msgpack.decode(memoryview(payload)[HEADER_BYTES:])
        written, fields[_HASH] = fields[_HASH], b""
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError):
        return False
    return bool(hashlib.sha256(payload[:HEADER_BYTES] + msgspec.msgpack.encode(fields)).digest() == written)


class ChainCheck:
    """Check that the actions of one job are intact and each follows its predecessor.

    Attributes:
        num_actions: checked so far.
    """

    def __init__(self) -> None:
        self.num_actions = 0
        self._last: Action | None = None

    def check_next(self, action: Action, payload: bytes) -> None:
        """Check the next action against the bytes that it was decoded from and the action before it.

        Raises:
            BrokenChainError: when it is not what was written, or not what follows.
        """
        where = f"the action for window {action.window} of generation {action.generation}"
        if not is_intact(payload):
            raise BrokenChainError(f"{where} is not as it was written: its hash does not match its content")
        if self._last is not None:
            before = f"window {self._last.window} of generation {self._last.generation}"
            if (action.generation, action.window) <= (self._last.generation, self._last.window):
                raise BrokenChainError(f"{where} stands behind the one for {before}")
            if action.previous_hash != self._last.hash:
                raise BrokenChainError(f"{where} does not follow the one before it, for {before}")
        self._last = action
        self.num_actions += 1
