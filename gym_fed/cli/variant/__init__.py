"""`gym variant`.

Neighbours: imports data, train; imported by chat, main.
"""
