"""`gym eval`.

Neighbours: imports models; imported by leaderboard, main.
"""
