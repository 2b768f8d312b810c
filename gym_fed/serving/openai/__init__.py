"""OpenAI's API without HTTP: it takes requests as dicts, and returns answers and stream chunks as dicts.

``gym api`` serves it over HTTP, and ``gym batch`` calls it for each line of a file.
"""
