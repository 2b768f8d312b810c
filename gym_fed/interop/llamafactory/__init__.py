"""LLaMA-Factory's YAML files: recognised, translated, and each key without a counterpart named with its line."""
