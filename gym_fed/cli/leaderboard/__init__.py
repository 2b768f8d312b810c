"""`gym leaderboard`."""
