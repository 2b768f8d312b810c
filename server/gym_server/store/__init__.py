"""The hub's state on disk: one SQL database and one content-addressed object store."""
