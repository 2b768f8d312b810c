"""The variant store: thousands of variants on disk, verified before use, with the recently used ones in memory."""
