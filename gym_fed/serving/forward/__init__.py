"""The multi-variant forward pass: KV caches, attention, and the terms that each variant adds at a module."""
