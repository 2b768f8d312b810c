"""The tracker of contributors who serve public objects to each other."""
