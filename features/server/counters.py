"""What /metrics shows, as Prometheus reads it (https://prometheus.io/docs/instrumenting/exposition_formats)."""

import bisect
from collections import Counter
from dataclasses import dataclass, field

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # texts of a batch
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # of a request


class Histogram:
    """How many values are at most each of `bounds`, and their sum."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


@dataclass
class Counters:
    """The counts of a server. Each is changed by one thread."""

    requests: Counter = field(default_factory=Counter)  # {status: answered requests}
    tokens: Counter = field(default_factory=Counter)  # {"read" or "written": tokens}
    batches: Histogram = field(default_factory=lambda: Histogram(SIZES))
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def text(self, waiting: int) -> str:
        """The page of /metrics. waiting: texts that wait."""
        shown = {
            ("requests_total", "counter", "requests by status; 499: the client went away"): [
                f't5_requests_total{{status="{status}"}} {count}' for status, count in sorted(self.requests.items())
            ],
            ("queue_texts", "gauge", "texts that wait"): [f"t5_queue_texts {waiting}"],
            ("tokens_total", "counter", "tokens of answered requests"): [
                f't5_tokens_total{{side="{side}"}} {self.tokens[side]}' for side in ("read", "written")
            ],
            ("batch_texts", "histogram", "texts that were answered together"): self.batches.lines("t5_batch_texts"),
            ("request_seconds", "histogram", "seconds of answered ones"): self.seconds.lines("t5_request_seconds"),
        }
        lines = []
        for (name, kind, about), values in shown.items():
            lines += [f"# HELP t5_{name} {about}", f"# TYPE t5_{name} {kind}", *values]
        return "\n".join(lines) + "\n"
