"""`gym chat`: a session, and the writers of its answers."""
