"""Updates that are suspiciously alike or large."""
