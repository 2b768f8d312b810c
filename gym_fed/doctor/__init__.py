"""`gym doctor`: check this installation, and name a remedy for each problem.

A check is a class in a file of ``gym_fed/doctor/checks``, or one of another package.
"""
