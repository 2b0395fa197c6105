"""Learned policies as text: the list as a table, one policy line by line."""

from collections.abc import Mapping, Sequence
from typing import Any

from dynamix.arbitrator.learned.policy_file import PolicyMetadata

from .catalogue import AvailablePolicy

HEADINGS = ("policy", "version", "from", "size", "features", "stored", "sha256")
NUM_DIGEST_CHARACTERS = 12
NAME_WIDTH = 20
LONG_LISTS = ("rank_features", "global_features", "inputs")
"""Left out here; `--json` has them."""


def table(entries: Sequence[AvailablePolicy]) -> str:
    """One line per version."""
    if not entries:
        return "no learned policies: `dynamix learn` makes one, `dynamix policy import FILE` stores one"
    rows = [HEADINGS, *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def details(entry: AvailablePolicy, metadata: PolicyMetadata | None, fault: str) -> str:
    """One version, a property per line."""
    place = "comes with the package" if entry.origin == "shipped" else f"on the bus since {_when(entry.stored_at)}"
    lines = [
        f"{entry.name} version {entry.version}, {place}",
        _line("size", f"{entry.num_bytes:,} bytes"),
        _line("sha256", entry.sha256),
        _line("usable here", f"no: {fault}" if fault else "yes"),
    ]
    if metadata is not None:
        shown = [name for name in metadata.__struct_fields__ if name not in LONG_LISTS]
        lines += [_line(name.replace("_", " "), _text(getattr(metadata, name))) for name in shown]
    return "\n".join(lines)


def _row(entry: AvailablePolicy) -> tuple[str, ...]:
    return (
        entry.name,
        str(entry.version),
        "the package" if entry.origin == "shipped" else "the bus",
        f"{entry.num_bytes / 1024:.0f} KB",
        str(entry.feature_version or "?"),
        _when(entry.stored_at) or "-",
        entry.sha256[:NUM_DIGEST_CHARACTERS],
    )


def _when(time: str) -> str:
    """To the second: `2026-11-20 17:22:03`."""
    return time[:19].replace("T", " ")


def _line(name: str, value: str) -> str:
    return f"  {name:{NAME_WIDTH}}{value}"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items()) or "-"
    if isinstance(value, (tuple, list)):
        return ", ".join(_text(item) for item in value) or "-"
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"
