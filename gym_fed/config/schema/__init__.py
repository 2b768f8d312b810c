"""What all schemas share: the base class, members of registries as values, keys that members add."""
