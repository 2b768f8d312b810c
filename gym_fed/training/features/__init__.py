"""Features of the model's code, one file each: file name = registry name = key of the YAML's top level."""
