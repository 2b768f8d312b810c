"""Decode sound and video with PyAV, in a child process with limits."""
