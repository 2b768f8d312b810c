"""`gym variant`.

Neighbours: imports data, models, train; imported by leaderboard, main.
"""
