"""Run the arbitrator: `python -m dynamix.arbitrator`."""

import sys

from dynamix.runtime.service import run

from .service import ArbitratorSettings, serve

if __name__ == "__main__":
    sys.exit(run("arbitrator", ArbitratorSettings, serve))
