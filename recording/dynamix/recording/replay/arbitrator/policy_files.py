"""The stream of policies for a replayed arbitrator: files given by the caller, under their recorded versions."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dynamix.arbitrator.learned.policy_file import SHIPPED_VERSION, PolicyFile, shipped_policy
from dynamix.recording.playback import ReplayError
from dynamix.runtime.bus import BusMessage
from dynamix.runtime.input_files import read_regular
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Action, PolicyVersion

from .action_store import ReplayedActions

GIVEN_VERSION = SHIPPED_VERSION + 1
"""Version of a file that decided no recorded window: newer than the files of the package."""


class _GivenFile(NamedTuple):
    policy: str
    data: bytes
    digest: bytes


class ReplayPolicyFiles:
    """Learned policies that a replay can use beside those of the package."""

    def __init__(self, paths: Sequence[Path], actions: ReplayedActions) -> None:
        """Read the files; `actions` knows which version decided next.

        Raises:
            ReplayError: when one cannot be read.
            ValueError: when one is no policy file; the text gives the reason.
        """
        self._files = [_read(path) for path in paths]
        self._actions = actions

    async def stored(self) -> list[BusMessage]:
        """The messages in POLICIES for the generation that is replayed.

        Raises:
            ReplayError: when its next recorded action, if one matters, was decided by a file that is not given.
        """
        decided = self._actions.next_recorded()
        listed = {(file.policy, GIVEN_VERSION): file for file in self._files}
        if decided is not None and decided.policy_digest:
            found = next((file for file in self._files if file.digest == decided.policy_digest), None)
            if found is None:
                _check_shipped(decided)
            else:
                listed = {(decided.policy, decided.policy_version): found}
        return [
            BusMessage(
                subjects.of("policy", name),
                encode(PolicyVersion(policy=name, version=version, digest=file.digest, content=file.data)),
                sequence,
                0,
                0,
            )
            for sequence, ((name, version), file) in enumerate(listed.items(), start=1)
        ]


def _read(path: Path) -> _GivenFile:
    try:
        data = read_regular(path)
    except OSError as error:
        raise ReplayError(f"cannot read the policy file {path}: {error.strerror}") from error
    return _GivenFile(PolicyFile.from_bytes(data, str(path)).metadata.policy, data, hashlib.sha256(data).digest())


def _check_shipped(decided: Action) -> None:
    shipped = shipped_policy(decided.policy) if decided.policy_version == SHIPPED_VERSION else None
    if shipped is not None and hashlib.sha256(shipped).digest() == decided.policy_digest:
        return
    raise ReplayError(
        f"version {decided.policy_version} of policy {decided.policy!r} decided here, but its file (SHA-256 "
        f"{decided.policy_digest.hex()[:16]}...) is not given: get it from the bus with "
        "`dynamix policy export` and give it with --policy-file"
    )
