"""Sizes and times that both ends of the wire agree on."""

from __future__ import annotations

PROTOCOL = 2
"""Version of the wire contract: what is signed, and what a message means. Both ends must speak the same one.

1 was gym-fed 0.1, which sent none; 2 signs the TLS key at enrolment and login, and has account ids of 128 bits.
"""

CHUNK_BYTES = 1 << 20
"""Payload of one upload or download message."""

MAX_MESSAGE_BYTES = CHUNK_BYTES + (64 << 10)
"""gRPC refuses larger messages before buffering them."""

SESSION_KEY = "gym-session"
"""Metadata key of the session token."""

KEEPALIVE_SECONDS = 20.0
"""How often a silent work stream says that it is alive."""

CALL_SECONDS = 30.0
"""Deadline of a unary call."""

DEFAULT_PORT = 9443

DELTA_STYPE = "gym.delta.v1"
"""Serialisation type of a Flower ``Array`` whose bytes are a ``.gymdelta`` file."""

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
