"""The gRPC health service (``grpc.health.v1``), for load balancers, orchestrators and `gym-server health`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from grpc_health.v1 import health_pb2
from sqlalchemy import select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.trust.wire.service import HUB
from gym_server.store.database import Database
from gym_server.store.unavailable import StoreUnavailable

log = logging.getLogger("gym_server")


class Health:
    """The service ``grpc.health.v1.Health``, without ``Watch``, since open streams cost memory.

    The service name ``""`` refers to the process, which serves if it answers. ``gym.fed.v1.Hub`` refers to the hub's
    calls, which are served if the database can be read.

    Args:
        database: The hub's database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Return the status of a service: serving if it can answer calls.

        Raises:
            GymError: ``NOT_FOUND`` for an unknown service.
        """
        if request.service not in ("", HUB.full_name):
            hint = f"use '' (the process) or {HUB.full_name}"
            raise GymError(
                ErrorCode.NOT_FOUND, f"no service {plain(request.service, 80)!r} on this hub", hint
            )
        serves = request.service == "" or await asyncio.to_thread(self._can_read)
        return health_pb2.HealthCheckResponse(status="SERVING" if serves else "NOT_SERVING")

    def _can_read(self) -> bool:
        try:
            with self._database.reading() as tx:
                tx.execute(select(1))
        except StoreUnavailable as away:
            log.debug("%s", away)  # the strategy reports it
            return False
        return True
