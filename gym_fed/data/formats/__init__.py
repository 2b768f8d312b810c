"""Dataset formats, one per file, that convert raw rows to rows of ``gym_fed.data.rows`` and back."""
