"""`gym chat`: a conversation, and who writes its answers.

Neighbours: imports engine, openai, setup, store; imported by none.
"""
