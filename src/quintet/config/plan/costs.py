"""Time of a phase of a step, and the bytes that a device sends in it over each of its links."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Channel = tuple[str, str]
"""Link, by the name of its bandwidth in `DeviceFigures` (`link`, `network`, `host`), and purpose of the transfer."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, and bytes by link and purpose."""

    seconds: float = 0.0
    sent: Mapping[Channel, float] = field(default_factory=dict)
    """Bytes that a device sends; on `network`, those through the adapter of a device."""

    def __add__(self, other: "Cost") -> "Cost":
        channels = {**self.sent, **other.sent}
        sent = {channel: self.sent.get(channel, 0) + other.sent.get(channel, 0) for channel in channels}
        return Cost(self.seconds + other.seconds, sent)

    def __rmul__(self, count: float) -> "Cost":
        return Cost(count * self.seconds, {channel: count * size for channel, size in self.sent.items()})

    def lasting(self, seconds: float) -> "Cost":
        """Return the same transfers in another time."""
        return Cost(seconds, self.sent)
