"""Rows of data files for the pages, read and tokenised in a process of their own, so that the server's stays small."""
