"""Dataset formats, one per file, which convert raw rows to rows of ``gym_fed.data.rows`` and back."""
