"""What a service shows to Prometheus and to health probes, on one HTTP port: `/metrics`, `/livez`, `/readyz`.

In come functions that show what a service holds anyway; out goes text, when it is asked for. Between two scrapes it
costs nothing: no number is copied or labelled while messages are handled. `scrape` collects the samples of one request,
`registry` knows what to ask, `label_table` bounds what is kept by job, `server` answers. It knows no service and no
bus.
"""

from .label_table import LabelTable
from .registry import ServiceMetrics
from .scrape import Scrape
from .server import MetricsServer

__all__ = ["LabelTable", "MetricsServer", "Scrape", "ServiceMetrics"]
