"""Generated text tasks with a measurable answer, one module a family, in one registry."""
