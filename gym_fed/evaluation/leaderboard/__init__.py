"""Leaderboards: files of signed, chained lines. A result is reproduced if a different key has re-run samples of it."""
