"""What the server counts, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from imagination.serving.gate import Gate
from imagination.serving.sessions import Sessions


class ServedMetrics(Collector):
    """Reads the counts of sessions and gate when it is asked for them, so that these know no Prometheus."""

    def __init__(self, sessions: Sessions, gate: Gate) -> None:
        self._sessions, self._gate = sessions, gate
        self._registry = CollectorRegistry()  # its own: a process may have several servers
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        counts = self._sessions.counts
        yield GaugeMetricFamily("imagination_sessions", "Sessions that are open", value=len(self._sessions))
        yield GaugeMetricFamily("imagination_requests", "HTTP requests under way", value=self._gate.under_way)
        yield CounterMetricFamily("imagination_sessions_opened", "Sessions opened", value=counts.opened)
        yield CounterMetricFamily("imagination_sessions_expired", "Sessions closed as idle", value=counts.expired)
        yield CounterMetricFamily("imagination_steps_untrusted", "Steps the guard doubted", value=counts.untrusted)
        yield SummaryMetricFamily(
            "imagination_step_seconds", "Dreamed steps", count_value=counts.steps, sum_value=counts.step_seconds
        )
        episodes = CounterMetricFamily("imagination_episodes", "Episodes that are over", labels=["stop"])
        for stop, number in sorted(counts.episodes.items()):
            episodes.add_metric([stop], number)
        yield episodes
        refused = CounterMetricFamily("imagination_refused", "Requests that were not served", labels=["reason"])
        for reason, number in sorted((counts.refused + self._gate.refused).items()):
            refused.add_metric([reason], number)
        yield refused
