"""State on disk: one SQL database and one content-addressed object store."""
