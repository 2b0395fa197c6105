"""How often other threads have entered this interpreter."""

import ctypes

_api = ctypes.pythonapi
_api.PyInterpreterState_Get.restype = ctypes.c_void_p
_api.PyThreadState_New.restype = ctypes.c_void_p
_api.PyThreadState_New.argtypes = [ctypes.c_void_p]
_api.PyThreadState_GetID.restype = ctypes.c_uint64
for _function in (_api.PyThreadState_GetID, _api.PyThreadState_Clear, _api.PyThreadState_Delete):
    _function.argtypes = [ctypes.c_void_p]


class Entries:
    """Counts from its making on; a thread that Python did not start has a new state each time that it enters."""

    def __init__(self) -> None:
        self._first = _next_state()

    def count(self) -> int:
        """States that others had since; before it, wait for the threads in question."""
        return _next_state() - self._first - 1


def _next_state() -> int:
    """The number of a state made for this; they count up."""
    state = _api.PyThreadState_New(_api.PyInterpreterState_Get())
    number = int(_api.PyThreadState_GetID(state))
    _api.PyThreadState_Clear(state)
    _api.PyThreadState_Delete(state)
    return number
