"""Errors of the bus. Every text states what was refused and how to fix it."""


class BusError(RuntimeError):
    """Anything the bus could not do."""


class ConnectionClosedError(BusError):
    """The connection is closed for good: by us, or by the broker (then the process should end and be restarted)."""


class PermissionDeniedError(BusError):
    """The broker does not let this user do this; retrying does not help."""


class StreamMissingError(BusError):
    """There is no stream for this subject or of this name: run `dynamix provision`."""


class PublishError(BusError):
    """A message was not acknowledged within its budget, or the broker refused it."""


class StreamFullError(PublishError):
    """The stream is full and discards no older message; it may have room again later."""


class StaleWriterError(BusError):
    """Compare-and-set was refused: another writer has written since."""


class SequenceRegressError(BusError):
    """A stream ends before what was already read from it: the broker lost data, or the stream was recreated."""


class ApiError(BusError):
    """An error that JetStream's API returned.

    Attributes:
        code: like an HTTP status.
        err_code: JetStream's own number.
    """

    def __init__(self, text: str, code: int, err_code: int) -> None:
        super().__init__(text)
        self.code = code
        self.err_code = err_code


UNAVAILABLE = 503
"""JetStream's code where trying again can help; 500 otherwise."""
CONSUMER_NOT_FOUND = 10014
MESSAGE_NOT_FOUND = 10037
STREAM_NOT_FOUND = 10059
STORE_FAILED = 10077
STILL_IN_PROCESS = 10158
"""Servers of a cluster have not agreed on the first copy of a message yet when the second one comes."""
WRONG_LAST_SEQUENCE = (10071, 10164)
