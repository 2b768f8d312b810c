"""`gym-server`: one module a group of commands, and what the coordinator sees."""
