"""The metric window of a virtual cluster's report: it says itself what a kernel would have shown. Pure."""

from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import MetricWindow, NodeMetrics, Report

from .probes import Evidence, WantedProbe, read_network
from .window import metric_window


def simulated_window(report: Report, probe: WantedProbe = "auto") -> MetricWindow:
    """The window of a report with `simulated` metrics; neither /proc nor the kernel is read.

    Raises:
        MalformedMessageError: when the metrics are not one per row.
    """
    if len(report.simulated) != len(report.rows):
        raise MalformedMessageError(
            f"{len(report.simulated)} simulated processes for {len(report.rows)} rows: there must be one for each"
        )
    node = NodeMetrics()
    network = read_network(Evidence(report, node), probe)._replace(note="")  # it has no better probe to speak of
    systems = {row.rank: system for row, system in zip(report.rows, report.simulated, strict=True)}
    return metric_window(report, systems=systems, node=node, network=network)
