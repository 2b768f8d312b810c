"""The gRPC messages between hub and clients, and conversions to and from them."""
