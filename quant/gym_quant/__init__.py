"""Codecs for weight deltas. Imports only torch, numpy and its own kernels."""
