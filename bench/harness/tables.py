"""Tables: aligned columns for terminals, Markdown for documents, and the part of a document between two markers."""

from collections.abc import Mapping, Sequence
from typing import Any

Cells = Sequence[str]


def aligned(headings: Cells, rows: Sequence[Cells]) -> str:
    """Columns as wide as their widest cell: the first one to the left, the others to the right."""
    table = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in table
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def formatted(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Aligned columns of named figures; `columns`: the format of a cell, such as `{ratio:.2f}`, by heading."""
    return aligned([*columns], [[cell.format_map(row) for cell in columns.values()] for row in rows])


def markdown(headings: Cells, rows: Sequence[Cells], *, num_left: int | None = None) -> str:
    """A Markdown table; columns after the first `num_left` are aligned to the right."""
    num_right = 0 if num_left is None else len(headings) - num_left
    rule = "|---" * (len(headings) - num_right) + "|---:" * num_right + "|"
    head, *body = (f"| {' | '.join(row)} |" for row in (headings, *rows))
    return "\n".join([head, rule, *body])


def replaced(document: str, begin: str, end: str, text: str) -> str:
    """The document with `text` between two markers, on lines of its own.

    Raises:
        ValueError: when the document does not have both markers.
    """
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the document has no place for the table: it needs the lines {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def number(value: float | None, digits: int = 2) -> str:
    """A figure with so many digits; `-` when it is not known."""
    return "-" if value is None else f"{value:,.{digits}f}"
