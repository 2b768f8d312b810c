"""OpenAI's HTTP API without HTTP: requests as dicts in, answers and stream chunks as dicts out.

``gym api`` serves it over HTTP, and ``gym batch`` calls it for each line of a file.
"""
