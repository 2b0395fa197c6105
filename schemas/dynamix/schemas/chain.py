"""The chain of actions: each carries a hash over itself and its predecessor's hash."""

import hashlib

import msgspec

from .codec import encode
from .messages import Action


def seal(action: Action, previous_hash: bytes) -> Action:
    """The action with its place in the chain: SHA-256 over its encoded bytes with an empty `hash`."""
    open_action = msgspec.structs.replace(action, previous_hash=previous_hash, hash=b"")
    return msgspec.structs.replace(open_action, hash=hashlib.sha256(encode(open_action)).digest())


def is_sealed(action: Action) -> bool:
    """Whether the action's hash is the one of its content."""
    return seal(action, action.previous_hash).hash == action.hash
