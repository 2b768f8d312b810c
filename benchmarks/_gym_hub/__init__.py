"""Our side of the transport benchmark: the hub and a contributor's transport as real processes."""

from _gym_hub.measure import measure_gym

__all__ = ["measure_gym"]
