"""Read YAML files into validated schemas; every error names file, line and column."""
