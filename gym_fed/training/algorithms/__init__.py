"""The training algorithms, one file each: file name = registry name = YAML value. Dropping a file in registers it."""
