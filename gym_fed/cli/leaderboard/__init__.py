"""`gym leaderboard`.

Neighbours: imports evaluation, variant; imported by main.
"""
