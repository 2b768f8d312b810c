"""YAML files to validated schemas; every error names file, line and column."""
