"""`make demo`: a whole federation on one machine, from real processes over gRPC with TLS."""
