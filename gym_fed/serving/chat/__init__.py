"""`gym chat`: a session, and the writers of its answers.

Neighbours: imports end_tokens, engine, openai, setup, store; imported by none.
"""
