"""Limits and timeouts that hub and clients share."""

from __future__ import annotations

PROTOCOL = 3
"""Version of the protocol: the signed data and the meaning of messages. Both ends must use the same version."""

CHUNK_BYTES = 1 << 20
"""Maximum payload of one upload or download message in bytes."""

MAX_MESSAGE_BYTES = CHUNK_BYTES + (64 << 10)
"""Maximum size of a message in bytes; gRPC refuses larger messages before buffering them."""

SESSION_KEY = "gym-session"
"""Metadata key of the session token."""

KEEPALIVE_SECONDS = 20.0
"""Seconds between keepalive messages on a silent work stream."""

CALL_SECONDS = 30.0
"""Deadline of a unary call in seconds."""

DEFAULT_PORT = 9443

DELTA_STYPE = "gym.delta.v1"
"""Serialisation type (``stype``) of a Flower ``Array`` whose bytes are a ``.gymdelta`` file."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)

MAX_STREAMS_PER_CONNECTION = 32
"""Maximum concurrent calls per connection. A client needs only a few; gRPC queues the rest on the client's side."""

MAX_CONNECTION_SECONDS = 3600
"""Maximum age of a connection in seconds. New calls then use a new connection, and open calls have the same time again
to finish. A work stream is reopened every hour, so it moves to the new connection without interruption."""

IDLE_CONNECTION_SECONDS = 300
"""Seconds after which a connection without calls is closed; the next call opens a new one."""


def server_options(
    handshake_seconds: float, connections: int, idle_seconds: int = IDLE_CONNECTION_SECONDS
) -> tuple[tuple[str, int], ...]:
    """Return the gRPC options for the server of a hub or a seeder.

    Args:
        handshake_seconds: Time limit of the TLS handshake in seconds, after which the connection is closed.
        connections: Maximum number of connections; any further ones are closed immediately.
        idle_seconds: Seconds after which a connection without calls is closed.
    """
    return (
        *CHANNEL_OPTIONS,
        ("grpc.so_reuseport", 0),  # otherwise two hubs on one port would each get some of the contributors
        ("grpc.server_handshake_timeout_ms", int(1000 * handshake_seconds)),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_connection_idle_ms", 1000 * idle_seconds),
        ("grpc.max_connection_age_ms", 1000 * MAX_CONNECTION_SECONDS),
        ("grpc.max_connection_age_grace_ms", 1000 * (MAX_CONNECTION_SECONDS + 300)),
    )
