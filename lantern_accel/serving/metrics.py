"""Counts what ``/metrics`` shows, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily

from lantern_accel.decoding.decoded import Decoded
from lantern_accel.device.backend import Backend

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

#: How a request for images ends: generated; not taken; its client left; the server's fault.
OUTCOMES = ("ok", "refused", "cancelled", "failed")


class Energy:
    """Reads the device's energy meter when it is asked; without one there is no such metric."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter, where the device has a meter."""
        spent = self.backend.energy_mj()
        if spent is not None:
            text = "Energy that the device's meter has counted."
            found = CounterMetricFamily("lantern_energy_joules", text, labels=["meter"])
            found.add_metric([f"{self.backend.name} {self.backend.facts().name}"], spent / 1000)
            yield found


class Metrics:
    """The figures of one server, in a registry of their own."""

    def __init__(self, backend: Backend, slots: int) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"lantern_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"lantern_{name}", text, labels, buckets=SECONDS, registry=registry)

        self.requests = counter("requests", "Answers by path and status.", "path", "status")
        self.images = counter("images", "Complete images.")
        self.tokens = counter("tokens", "Image tokens of complete images.")
        self.steps = counter("steps", "Target passes of complete images, prefill left out.")
        self.total_variation = counter(
            "total_variation",
            "Total variation, an upper bound: summed over tokens of complete images.",
        )
        self.turns = counter("turns", "Runs of steps between two looks at the batch.")
        self.dropped = counter("cancelled_images", "Images that were given up half-way.")
        self.failed = counter("failed_requests", "Requests that failed, not refused ones.", "code")
        self.waiting = Gauge("lantern_queue_images", "Images that wait.", registry=registry)
        self.running = Gauge("lantern_slots_busy", "Rows with an image.", registry=registry)
        Gauge("lantern_slots", "Rows of the running batch.", registry=registry).set(slots)
        text = "From request to the end of its answer, by how it ended, streamed ones too."
        self.seconds = seconds("request_seconds", text, "outcome")
        for outcome in OUTCOMES:  # outcomes that are 0 too
            self.seconds.labels(outcome)
        text = "From request to its first partial image."
        self.first_partial = seconds("first_partial_seconds", text)
        registry.register(Energy(backend))

    def drew(self, done: Decoded) -> None:
        """Count a complete image."""
        self.images.inc()
        self.tokens.inc(done.tokens.numel())
        self.steps.inc(int(done.steps.sum()))
        self.total_variation.inc(float(done.quality_loss.sum()))
