"""Training rounds, from the first task to a committed version: admission, message queue, merge and replay."""
