"""Send a ``GymError`` over gRPC: a status code, and the full error in the trailer ``gym-error-bin``."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import harmless
from gym_fed.trust.wire.v1 import hub_pb2 as pb

TRAILER = "gym-error-bin"


def to_status(error: GymError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return the status, the details and the trailing metadata with which a call is aborted."""
    message, hint = (
        harmless(error.message[:4000]),
        harmless(error.hint[:1000]),
    )  # messages may contain untrusted input
    body = pb.Error(code=error.code.value, message=message, hint=hint)
    return (grpc.StatusCode[error.code.grpc_status], message[:1000], ((TRAILER, body.SerializeToString()),))


def from_rpc_error(error: Any, target: str) -> GymError:
    """Return the ``GymError`` from a failed call, or create one that describes the transport failure."""
    for key, value in error.trailing_metadata() or ():
        if key == TRAILER:
            try:
                body = pb.Error.FromString(value)
            except DecodeError:
                break
            return GymError.from_dict({"code": body.code, "message": body.message, "hint": body.hint})
    status, details = error.code(), error.details() or ""
    if status == grpc.StatusCode.UNAVAILABLE:
        # gRPC lists all addresses before the reason for the failure.
        reason = details.rpartition("Failed to connect to remote host: ")[2]
        hint = "check the address, and that the server is running"
        return GymError(ErrorCode.UNAVAILABLE, f"cannot reach {target}: {reason}", hint)
    if status == grpc.StatusCode.DEADLINE_EXCEEDED:
        return GymError(ErrorCode.DEADLINE_EXCEEDED, f"{target} did not answer in time: {details}")
    if status == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return GymError(ErrorCode.TOO_LARGE, f"{target}: {details}")
    if status == grpc.StatusCode.UNIMPLEMENTED:
        return GymError(ErrorCode.UNAVAILABLE, f"{target} does not speak gym.fed.v1", "is it a gym-server?")
    return GymError(ErrorCode.INTERNAL, f"{target}: {status.name.lower()}: {details}")
