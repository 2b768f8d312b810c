"""What rounds cost the examples of this machine, and secure aggregation on the contributor's side."""
