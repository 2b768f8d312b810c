"""`gym variant`.

Neighbours: imports completion, models, next_command, train; imported by leaderboard, main.
"""
