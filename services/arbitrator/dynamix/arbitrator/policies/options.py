"""Options of policies, as authors of policies import them."""

from .base.options import (
    Option,
    Options,
    allocation_of,
    check_options,
    name_of,
    named,
    option,
    switch,
    track,
    tracks,
)

__all__ = [
    "Option",
    "Options",
    "allocation_of",
    "check_options",
    "name_of",
    "named",
    "option",
    "switch",
    "track",
    "tracks",
]
