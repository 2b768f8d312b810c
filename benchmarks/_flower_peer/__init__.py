"""Stock Flower as the transport benchmark's peer: SuperLink, SuperNode and a Flower app as real processes."""

from _flower_peer.measure import measure_flower

__all__ = ["measure_flower"]
