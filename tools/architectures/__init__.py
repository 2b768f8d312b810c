"""Check every language model class of transformers here with a tiny random model, and write docs/support.md."""
