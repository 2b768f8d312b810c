"""`gym chat`: a conversation, and who writes its answers. Imports ``engine`` and ``openai``."""
