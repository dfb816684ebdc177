"""Figures of the CPU of this machine, measured in a fraction of a second."""

import time
from collections.abc import Callable

from quintet.config.plan.devices import DeviceFigures
from quintet.config.plan.model_shapes import ModelShape

MEASURED_TOKENS = 256
"""Rows of the measured matrix product."""
MAX_WIDTH = 2048
"""Largest side of a measured weight matrix: larger products have the same rate, and take longer."""
COPIED_BYTES = 32 << 20
SECONDS = 0.1
"""Time of each of the two measurements."""


def measure_cpu(shape: ModelShape) -> DeviceFigures:
    """Measure float32 products of the shape of an MLP of the policy, and copies of memory."""
    import numpy as np  # a tenth of a second, which plans of other machines need not take

    hidden, wide = min(shape.hidden, MAX_WIDTH), min(shape.active_mlp, MAX_WIDTH)
    states, weight = np.ones((MEASURED_TOKENS, hidden), np.float32), np.ones((hidden, wide), np.float32)
    product = np.empty((MEASURED_TOKENS, wide), np.float32)
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    rate = 2.0 * MEASURED_TOKENS * hidden * wide / _seconds(lambda: np.matmul(states, weight, out=product))
    bandwidth = 2.0 * COPIED_BYTES / _seconds(lambda: np.copyto(target, source))
    links = {"link": bandwidth, "network": bandwidth, "host": bandwidth}
    return DeviceFigures("this machine", 0.0, rate, rate, bandwidth, **links, source="measured")


def _seconds(action: Callable[[], object]) -> float:
    """Return the shortest time of an action, repeated after a first run for `SECONDS`."""
    action()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while (begin := time.perf_counter()) < end:
        action()
        best = min(best, time.perf_counter() - begin)
    return best
