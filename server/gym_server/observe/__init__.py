"""What a hub tells its coordinator's monitoring: metrics for Prometheus, and spans of its rounds."""
