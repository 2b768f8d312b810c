"""Differential privacy: exact noise from a cryptographic source, bounded sensitivity, and accounting."""
