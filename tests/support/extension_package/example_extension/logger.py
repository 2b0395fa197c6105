"""`example`: appends each window's metrics as a line of JSON to the file that an environment variable names."""

import json
import os


class ExampleLogger:
    def __init__(self):
        self._file = open(os.environ["EXAMPLE_LOGGER_FILE"], "a")  # noqa: SIM115, PTH123 - closed by close

    def log(self, metrics, *, step):
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self):
        self._file.close()
