"""The common part of all schemas: the base class, members of registries as values, keys that members add."""
