"""Reasoning parsers, one file per family of models."""
