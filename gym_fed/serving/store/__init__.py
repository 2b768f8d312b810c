"""Thousands of variants on disk, verified before use, the recently used ones in memory."""
