"""`gym variant`.

Neighbours: imports completion, models, next_command, train, waiting; imported by leaderboard, main.
"""
