"""Tables and lines on a terminal, in one style for all commands."""

from collections.abc import Container, Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 240


def console_for(*, stderr: bool) -> Console:
    """A console as wide as the terminal; a file or a pipe has no width to respect."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


def new_table(
    *headings: str,
    rows: Iterable[Sequence[str | Text]] = (),
    left: Container[str] = (),
    title: str | None = None,
    show_header: bool = True,
) -> Table:
    """A table of right-aligned columns that are never folded; those in `left` are left-aligned."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), show_header=show_header)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print each line as it is: no markup, no colours, not wrapped."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
