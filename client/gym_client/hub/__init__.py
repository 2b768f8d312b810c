"""Calls to one hub: the channel, streams, uploads and downloads, and its signed heads."""
