"""The gRPC face of the hub: authentication, limits, streams, transfers. Imports every other folder but ``cli``."""
