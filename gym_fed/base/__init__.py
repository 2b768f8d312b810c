"""Base models: files, digests, loading, downloads and imports from other formats."""
