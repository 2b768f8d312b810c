"""`gym doctor`: what this installation is made of, what is amiss with it, and what to do about that.

A check is one function in a module of ``gym_fed/doctor/checks``; dropping a file there adds it.
"""
