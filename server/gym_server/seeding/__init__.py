"""The tracker of seeders: contributors who serve public objects to each other."""
