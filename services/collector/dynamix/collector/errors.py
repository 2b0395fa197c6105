"""The collector's own errors."""


class ProbeError(RuntimeError):
    """A probe cannot work here; the text says why and how to fix it."""
