"""Where the `bcc` module is: the distribution installs it for its own Python, outside of most environments."""

import importlib.util
from pathlib import Path

DISTRIBUTION_DIRECTORIES = (
    Path("/usr/lib/python3/dist-packages/bcc"),
    Path("/usr/lib/python3/site-packages/bcc"),
)
_PART = "libbcc.py"
"""PyPI has a `bcc` too, about lattices: it lacks this."""


def find_bcc() -> Path | None:
    """The directory of BCC's Python module, as the distribution installed it or else in this environment."""
    spec = importlib.util.find_spec("bcc")
    visible = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
    fedora = sorted(Path("/usr/lib").glob("python3.*/site-packages/bcc"), reverse=True)
    found = (path for path in (*DISTRIBUTION_DIRECTORIES, *fedora, *visible) if (path / _PART).is_file())
    return next(found, None)
