"""A base model: its files, digests, loading, downloads and imports from other formats."""
