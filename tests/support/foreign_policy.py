"""A policy file that another version of the program would have written."""

import msgspec
from tests.support import learned

from dynamix.arbitrator.learned.policy_file import PolicyFile


def of_other_features() -> bytes:
    """It knows `ping_ms` where this program has `srtt_us`."""
    file = learned.policy_file()
    names = tuple("ping_ms" if name == "srtt_us" else name for name in file.metadata.rank_features)
    return PolicyFile(msgspec.structs.replace(file.metadata, rank_features=names), file.tensors).to_bytes()
