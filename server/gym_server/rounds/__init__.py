"""Training rounds: message queue, admission, merge, commit and replay."""
