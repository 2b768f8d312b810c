"""`gym batch`: a file of requests in, a file of answers out. Imports ``openai`` and ``engine``."""
