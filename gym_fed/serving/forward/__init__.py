"""The multi-variant forward: KV caches, attention, and the terms that each variant adds at a module."""
