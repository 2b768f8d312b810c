"""The hub's gRPC service: authentication, limits, streams and transfers."""
