"""Differential privacy: exact noise from a cryptographic source, clips of known sensitivity, accounts of both."""
