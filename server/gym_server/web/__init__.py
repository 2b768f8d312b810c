"""The hub's dashboard: pages that show the database, live while the hub runs and read-only otherwise."""
