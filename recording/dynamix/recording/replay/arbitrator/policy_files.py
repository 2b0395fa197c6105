"""The bucket of policies for a replayed arbitrator: files given by the caller, under their recorded versions."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dynamix.arbitrator.learned.policy_file import SHIPPED_VERSION, PolicyFile, shipped_policy
from dynamix.arbitrator.learned.policy_store import BUCKET
from dynamix.recording.playback import ReplayError
from dynamix.runtime.bus import ObjectInfo, ObjectMissingError, StoredObject
from dynamix.runtime.bus.objects.layout import DIGEST_PREFIX
from dynamix.runtime.input_files import read_regular
from dynamix.schemas.messages import Action

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
        self._listed: dict[str, _GivenFile] = {}
        self._actions = actions

    async def list_all(self, bucket: str) -> list[ObjectInfo]:  # noqa: ARG002 - there is one
        """List the bucket for the policy of the generation that is replayed.

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
        self._listed = {f"{name}/{version}": file for (name, version), file in listed.items()}
        return [_info(name, file) for name, file in self._listed.items()]

    async def get(self, bucket: str, name: str, *, max_bytes: int = 0) -> StoredObject:  # noqa: ARG002 - as above
        """Return a listed object. Raises ObjectMissingError when there is none of this name."""
        file = self._listed.get(name)
        if file is None:
            raise ObjectMissingError(f"no policy file was given as {name}")
        return StoredObject(_info(name, file), file.data)


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


def _info(name: str, file: _GivenFile) -> ObjectInfo:
    digest = DIGEST_PREFIX + base64.urlsafe_b64encode(file.digest).decode()
    return ObjectInfo(name=name, bucket=BUCKET, nuid=name, size=len(file.data), chunks=1, digest=digest)
