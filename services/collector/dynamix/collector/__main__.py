"""Run the collector: `python -m dynamix.collector`."""

import sys

from dynamix.runtime.service import run

from .observation import CollectorSettings
from .service import serve

if __name__ == "__main__":
    sys.exit(run("collector", CollectorSettings, serve))
