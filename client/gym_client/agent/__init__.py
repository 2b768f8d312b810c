"""Tasks of a hub, done on this machine: what is loaded, trained, encoded and sent."""
