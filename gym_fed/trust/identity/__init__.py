"""Keys, signatures, and signed documents."""
