"""`gym doctor`: checks what this installation consists of, and names a remedy for each problem.

A check is a class in a file of ``gym_fed/doctor/checks``, or one of another package.
"""
