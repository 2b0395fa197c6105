"""Run the arbitrator: `python -m dynamix.arbitrator`."""

import sys

from dynamix.runtime.service import run

from .service import serve
from .settings import ArbitratorSettings

if __name__ == "__main__":
    sys.exit(run("arbitrator", ArbitratorSettings, serve))
