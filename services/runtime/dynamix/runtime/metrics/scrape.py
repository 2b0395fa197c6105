"""The samples of one scrape: names with our prefix, the label `component`, and a bound on their number."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "dynamix_"
MAX_SAMPLES = 20_000
"""Samples of one service in all; what is beyond is left out and counted. To write them takes 0.16 s of CPU time."""


class Scrape:
    """Takes what a service shows, once per request.

    Labels never are `job` and `instance`, which Prometheus gives to what it scrapes: a run of ours is `training_job`.

    Args:
        component: the service: the label `component` of every sample.
    """

    def __init__(self, component: str) -> None:
        self._component = component
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        self._num_samples = 0
        self._num_left_out = 0

    def gauge(self, name: str, meaning: str, value: float | None, /, **labels: str) -> None:
        """Show what goes up and down; nothing when it is not known."""
        if value is not None:
            self._add(GaugeMetricFamily, name, meaning, value, labels)

    def counter(self, name: str, meaning: str, value: float, /, **labels: str) -> None:
        """Show what only grows while the process lives; its name gets the ending `_total`."""
        self._add(CounterMetricFamily, name, meaning, value, labels)

    def families(self) -> Iterable[Metric]:
        """All that was shown, and how much was left out."""
        self._num_samples = 0  # there is always room for the one sample that says that there was none
        self.gauge("samples_left_out", "samples beyond the bound of one service, not shown", self._num_left_out)
        return self._families.values()

    def _add(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        meaning: str,
        value: float,
        labels: dict[str, str],
    ) -> None:
        if self._num_samples >= MAX_SAMPLES:
            self._num_left_out += 1
            return
        self._num_samples += 1
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(PREFIX + name, meaning, labels=("component", *labels))
        family.add_metric((self._component, *labels.values()), value)
