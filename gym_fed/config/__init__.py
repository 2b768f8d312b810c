"""Pydantic schemas of every YAML file, with errors that name file, line and column. No ML imports here."""
