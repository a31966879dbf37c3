"""What a monitor's service counts, in Prometheus' text format."""

from __future__ import annotations

from deepseal.defense.drift import AlarmDrift
from deepseal.errors import InputError

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
except ImportError as error:
    raise InputError(
        "the package prometheus-client for a monitor's service",
        found="none",
        do="install it: pip install 'deepseal[serve]'",
    ) from error

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counts of one service, in a registry of its own.

    Args:
        threshold: combined score above which an input alarms.
        promised: rate of alarms that clean inputs are promised not to exceed.
    """

    def __init__(self, threshold: float, promised: float) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "deepseal_requests", "Requests to judge by HTTP status.", ["status"], registry=self.registry
        )
        self._inputs = Counter("deepseal_inputs", "Inputs judged.", registry=self.registry)
        self._alarms = Counter("deepseal_alarms", "Inputs that raised the alarm.", registry=self.registry)
        self._seconds = Histogram(
            "deepseal_request_seconds", "Time of an answered request.", buckets=_SECONDS, registry=self.registry
        )
        self._sizes = Histogram(
            "deepseal_batch_inputs", "Inputs judged at once.", buckets=_SIZES, registry=self.registry
        )
        self._depth = Gauge("deepseal_queue_inputs", "Inputs that wait.", registry=self.registry)
        self._drifted = Gauge(
            "deepseal_alarm_drift", "1 once alarms were more frequent than promised.", registry=self.registry
        )
        self._evidence = Gauge(
            "deepseal_alarm_drift_log_evidence", "Log evidence against the promised rate.", registry=self.registry
        )
        Gauge("deepseal_threshold", "Score above which an input alarms.", registry=self.registry).set(threshold)
        Gauge("deepseal_promised_alarm_rate", "Rate that clean inputs do not exceed.", registry=self.registry).set(
            promised
        )

    def answered(self, status: int, seconds: float | None = None) -> None:
        """One request that was answered, or refused."""
        self._requests.labels(str(status)).inc()
        if seconds is not None:
            self._seconds.observe(seconds)

    def judged(self, inputs: int, alarms: int, drift: AlarmDrift) -> None:
        """One batch, and what is known of the drift after it."""
        self._inputs.inc(inputs)
        self._alarms.inc(alarms)
        self._sizes.observe(inputs)
        self._drifted.set(float(drift.drifted))
        self._evidence.set(drift.evidence)

    def depth(self, inputs: int) -> None:
        """How many inputs wait."""
        self._depth.set(inputs)

    def text(self) -> bytes:
        """All of it, as it is exposed."""
        return generate_latest(self.registry)
