"""One file is one codec; a file dropped in here is a member of the registry.

Neighbours: imports bitstream, codec, exact, factors, kernels, levels, packing, sides, splits, uniform;
imported by none.
"""
