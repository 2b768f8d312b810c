"""A round from its first task to a committed version: admission, queue, merge, replay."""
