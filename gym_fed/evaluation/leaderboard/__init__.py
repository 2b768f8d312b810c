"""Leaderboards: files of signed, chained lines. A result is reproduced when another key has re-run samples of it."""
