"""Leaderboards: files of signed, chained lines. A result counts as reproduced once another key has re-run samples."""
