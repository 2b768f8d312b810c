"""Pydantic schemas of all YAML files, with errors that name file, line and column. Imports no ML libraries."""
