"""Generated gRPC stubs and the conversions to and from them.

Neighbours: imports errors, text, version; imported by identity.
"""
