"""A run from its first step to its result: folder, loop, callbacks, checks and recovery."""
