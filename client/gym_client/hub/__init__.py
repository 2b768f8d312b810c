"""Calls to one hub: the channel, streams, uploads and downloads, and what the hub says."""
