"""Run the collector: `python -m dynamix.collector`."""

import sys

from dynamix.runtime.service import run

from .service import serve
from .settings import CollectorSettings

if __name__ == "__main__":
    sys.exit(run("collector", CollectorSettings, serve))
