"""`gym eval`.

Neighbours: imports default_command, models, train; imported by leaderboard, main.
"""
