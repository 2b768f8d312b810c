"""The gRPC face of the hub: authentication, limits, streams, transfers."""
