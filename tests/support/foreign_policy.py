"""A policy file that another version of the program would have written."""

import msgspec
from tests.support import learned

from dynamix.arbitrator.learned.policy_file import PolicyFile


def of_other_features() -> bytes:
    """Its network has an input that this program does not have."""
    file = learned.policy_file()
    names = ("ping_ms", *file.metadata.inputs[1:])
    return PolicyFile(msgspec.structs.replace(file.metadata, inputs=names), file.tensors).to_bytes()
