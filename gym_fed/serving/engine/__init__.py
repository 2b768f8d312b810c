"""Continuous batching: requests, their queue, sampling, and the loop that steps the model, without HTTP."""
