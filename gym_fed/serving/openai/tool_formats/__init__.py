"""Forms in which models write tool calls, one file each: how they are read, held to schemas, and shown to the model."""
