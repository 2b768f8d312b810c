"""The gRPC messages of the wire contract, and conversions to and from them."""
