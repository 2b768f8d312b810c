"""A board of results: a file of signed, chained lines; a line counts as reproduced once another key re-ran samples."""
