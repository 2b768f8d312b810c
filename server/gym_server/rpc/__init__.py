"""The hub's gRPC service: authentication, limits, streams, transfers."""
