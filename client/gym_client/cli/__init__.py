"""`gym-client`: one module a group of commands, with its questions and tables."""
