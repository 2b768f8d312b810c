"""The HTTP server of ``gym api``: keys, errors, metrics and streams around ``gym_fed.serving.openai``.

Neighbours: imports openai, pictures, plain_tokenizer, setup; imported by setup.
"""
