"""Check every language model class of transformers with a tiny random model, and write docs/support.md."""
