"""Members of other people's: what a package that adds to gym-fed looks like."""
