"""Generated text tasks; ``gym_fed.data.generated`` draws their rows."""
