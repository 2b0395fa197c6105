"""The first line of a ledger, by which a file of results is told from any other."""

import re

from dynamix.runtime.output_files import FileKind

HEADER = b'{"dynamix":"results of runs, a line each","format":1}\n'
_LINE = re.compile(rb'\{"key":"[0-9a-f]{64}","about":"')
"""How a ledger begins that was written before there was a header."""


def is_ledger(head: bytes) -> bool:
    """Whether a file begins as a ledger does: with the header, a part of it (torn by a kill), or a line of results."""
    return head.startswith(HEADER) or HEADER.startswith(head) or _LINE.match(head) is not None


LEDGER = FileKind("a file of results", is_ledger)
