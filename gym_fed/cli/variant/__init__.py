"""`gym variant`.

Neighbours: imports data, models, train; imported by chat, leaderboard, main.
"""
