"""The base model, handed to contributors who lack it: what is served, and the digests of its tensors."""
