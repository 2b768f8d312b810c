"""Generated gRPC stubs and the conversions to and from them.

Neighbours: imports errors, version; imported by identity.
"""
