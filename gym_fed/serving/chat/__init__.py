"""`gym chat`: a session, and the writers of its answers.

Neighbours: imports engine, openai, setup, store; imported by none.
"""
