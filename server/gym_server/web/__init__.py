"""The hub's dashboard: pages over the database, live while the hub runs and read-only when it is stopped."""
