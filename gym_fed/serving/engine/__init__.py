"""Continuous batching: requests, their queue, sampling, the loop that steps the model. Imports ``forward``; no HTTP."""
