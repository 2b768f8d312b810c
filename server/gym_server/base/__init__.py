"""Serving the base model to contributors who lack it: its files, and the digests of its tensors."""
