"""A run from its first step to its result: folder, loop, hooks, checks, recovery."""
