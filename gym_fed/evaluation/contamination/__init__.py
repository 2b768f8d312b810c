"""Evaluation rows in training data: found by runs of 13 words, in a filter of at most 1 MB a suite."""
