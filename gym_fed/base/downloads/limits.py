"""Limits on the size and duration of the Hub's responses."""

MAX_INFO_BYTES = 32 << 20
"""Maximum size of a description or a page of a listing; with some thousand files it is about a megabyte."""
MAX_OTHER_BYTES = 1 << 20
"""Maximum size of an error's or redirect's body, and of a file that the description does not list."""
READ_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 16 << 10
"""The time limit of a body is ``READ_SECONDS`` plus the time that its bytes take at this rate."""
