"""Seeding: contributors fetch public objects from each other and serve them."""
