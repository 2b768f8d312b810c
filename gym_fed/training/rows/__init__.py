"""Read, encode and pack the rows of a run, and find its batch size."""
