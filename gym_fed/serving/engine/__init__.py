"""Continuous batching: requests, their queue, sampling, and the loop that steps the model; no HTTP.

Neighbours: imports end_tokens, forward, plain_tokenizer; imported by chat, filter, openai, setup.
"""
