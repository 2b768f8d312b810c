"""The hub's dashboard: what the database holds as pages, live while the hub runs, and read-only when it is stopped."""
