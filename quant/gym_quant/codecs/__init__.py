"""Codecs. Each file is one codec, and adding a file registers it."""
