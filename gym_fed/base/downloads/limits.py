"""How much a Hub may send for a question, and how slowly."""

MAX_INFO_BYTES = 32 << 20
"""Of a description, or of a page of a listing; one with some thousand files has about a megabyte."""
MAX_OTHER_BYTES = 1 << 20
"""Of the body of an error or a redirect, and of a file that the description does not list."""
READ_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 16 << 10
"""A body may be waited for ``READ_SECONDS`` in all, and longer only while it comes faster than this."""
