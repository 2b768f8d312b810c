"""OpenAI's HTTP API without HTTP: requests as dicts in, answers and stream chunks as dicts out.

``gym api`` puts a server before it, ``gym batch`` feeds it lines of a file.
"""
