"""`gym doctor`: what this installation is made of, what is amiss with it, and what to do about that."""
