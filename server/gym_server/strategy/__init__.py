"""DeltaSoup as Flower strategies.

``DeltaSoup`` runs the hub's durable rounds of signed deltas. ``DeltaSoupStrategy`` replaces FedAvg in any Flower app
whose clients send plain arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import lazy

if TYPE_CHECKING:
    from gym_server.strategy.arrays import DeltaSoupStrategy as DeltaSoupStrategy
    from gym_server.strategy.durable import DeltaSoup as DeltaSoup

__all__, __getattr__ = lazy(__name__)
