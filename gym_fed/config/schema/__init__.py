"""Common parts of schemas: base class, registry members as values, and keys that members add."""
