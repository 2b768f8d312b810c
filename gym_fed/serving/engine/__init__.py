"""Continuous batching: requests, their queue, sampling, and the loop that steps the model; no HTTP.

Neighbours: imports forward; imported by chat, filter, openai, setup.
"""
