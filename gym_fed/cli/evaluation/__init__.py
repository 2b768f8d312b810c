"""`gym eval`.

Neighbours: imports completion, default_command, models, next_command, train; imported by leaderboard, main.
"""
