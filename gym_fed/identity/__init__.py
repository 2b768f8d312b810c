"""Keys, signatures, canonical bytes."""
