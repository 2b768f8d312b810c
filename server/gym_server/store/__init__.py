"""The hub's stored state: an SQL database and a content-addressed object store."""
