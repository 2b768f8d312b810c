"""Generated gRPC stubs and the conversions to and from them."""
