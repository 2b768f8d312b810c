"""`gym doctor`: what this installation is made of, what is amiss with it, and what to do about that.

A check is a class in a file of ``gym_fed/doctor/checks``, or one of another package.

Neighbours: imports errors, flower_env, kinds, text; imported by cli.
"""
