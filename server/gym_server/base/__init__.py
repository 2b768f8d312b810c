"""Serve the files of the base model, and the digests of its tensors, to contributors who do not have it."""
