"""What goes wrong with hosts on one machine."""


class HostsError(RuntimeError):
    """Hosts could not be made, changed or removed; the text says what is missing and how to fix it."""
