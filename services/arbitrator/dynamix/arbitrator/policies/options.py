"""Options of policies, as authors of policies import them."""

from .base.options import (
    Option,
    Options,
    allocation_of,
    check_options,
    named,
    option,
    switch,
    track,
    tracks,
)

__all__ = ["Option", "Options", "allocation_of", "check_options", "named", "option", "switch", "track", "tracks"]
