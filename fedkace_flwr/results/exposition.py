"""The state of a run as metrics for Prometheus (key ``metrics-port``)."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.results.status import Status

_ADDRESS = "127.0.0.1"
_LABELS = ("seat", "name")

_GAUGES = {
    "last_round": ("trained", 1, "Last round in which the device has trained."),
    "waiting_samples": ("waiting", 1, "Labelled samples that wait for a round."),
    "unlabelled_samples": ("unlabelled", 1, "Samples that wait for a label."),
    "rejected_files": ("rejected", 1, "Files that the device has rejected and holds."),
    "accuracy_ratio": ("accuracy", 1, "Accuracy on the device's test images."),
    "prequential_accuracy_ratio": ("prequential_accuracy", 1, "Accuracy on the last chunk, before training on it."),
    "prequential_accuracy_mean_ratio": ("prequential_mean", 1, "Running mean of the prequential accuracy."),
    "peak_memory_bytes": ("peak_memory", 2**20, "Peak memory in the last round, of the largest process."),
}
_COUNTERS = {
    "learned_samples": ("learned", "Samples that the device has learned."),
    "dropped_samples": ("dropped", "Samples without a label that were dropped: too old, or too many."),
    "alarms": ("alarms", "Alarms about the device."),
    "cpu_seconds": ("cpu_seconds", "CPU seconds that training and tests have cost the device."),
    "received_bytes": ("bytes_down", "Bytes of the messages to the device."),
    "sent_bytes": ("bytes_up", "Bytes of the replies of the device."),
}


class Exposition(Collector):
    """Shows the state of a run at a port of this machine; before there is one, nothing.

    Parameters
    ----------
    port : int
        The port, at 127.0.0.1.

    Raises
    ------
    ConfigError
        Nothing can listen there.
    """

    def __init__(self, port: int) -> None:
        self._status: Status | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, _ADDRESS, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics-port = {port}: cannot listen at {_ADDRESS}:{port} ({error.strerror or error}); must be a "
                "free port, or 0 for no metrics"
            ) from error

    def show(self, status: Status) -> None:
        """Show this state from now on."""
        self._status = status

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        status = self._status
        if status is None:
            return
        told = {name: str(status[name]) for name in ("run", "method", "version")}
        yield InfoMetricFamily("fedkace_run", "The run, and the version of the server.", told)
        yield GaugeMetricFamily("fedkace_last_round", "Last round that is done.", status["round"])
        yield _moment("fedkace_status_timestamp_seconds", "When the server wrote these numbers.", status["when"])
        for name, meaning in (
            ("accuracy", "Mean accuracy on the clients' test images."),
            ("prequential_accuracy", "Running mean, over all clients, of the accuracy on new chunks before training."),
        ):
            if status[name] is not None:
                yield GaugeMetricFamily(f"fedkace_{name}_ratio", meaning, status[name])
        alarms = CounterMetricFamily("fedkace_alarms", "Alarms of the run.", labels=["kind"])
        for kind, count in status["alarms_by_kind"].items():
            alarms.add_metric([kind], count)
        yield alarms
        yield from _of_devices(status["members"])


def _of_devices(members: list[dict[str, Any]]) -> Iterator[Metric]:
    labelled = [([str(each["seat"]), each["name"]], each) for each in members]
    online = GaugeMetricFamily("fedkace_device_online", "Whether the device could be reached.", labels=_LABELS)
    seen = GaugeMetricFamily("fedkace_device_seen_timestamp_seconds", "When it last could.", labels=_LABELS)
    version = InfoMetricFamily("fedkace_device", "The version of the device's app.", labels=_LABELS)
    for labels, each in labelled:
        online.add_metric(labels, each["online"])
        if each["last"]:
            seen.add_metric(labels, datetime.fromisoformat(each["last"]).timestamp())
        if each["version"]:
            version.add_metric(labels, {"version": each["version"]})
    yield from (online, seen, version)
    for name, (field, factor, meaning) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"fedkace_device_{name}", meaning, labels=_LABELS)
        for labels, each in labelled:
            if each[field] is not None:
                gauge.add_metric(labels, factor * each[field])
        yield gauge
    for name, (field, meaning) in _COUNTERS.items():
        counter = CounterMetricFamily(f"fedkace_device_{name}", meaning, labels=_LABELS)
        for labels, each in labelled:
            value = each[field]["total"] if isinstance(each[field], dict) else each[field]
            if value is not None:
                counter.add_metric(labels, value)
        yield counter


def _moment(name: str, meaning: str, text: str) -> Metric:
    return GaugeMetricFamily(name, meaning, datetime.fromisoformat(text).timestamp())
