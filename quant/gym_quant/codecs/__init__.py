"""One file is one codec; a file dropped in here is a member of the registry.

Neighbours: imports bitstream, codec, exact, factor_encoding, factors, kernels, levels, packing, splits,
uniform; imported by none.
"""
