"""Generated text tasks, one file each; ``gym_fed.data.generated`` draws their rows."""
