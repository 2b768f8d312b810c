"""Keys and values of configs that have another name elsewhere, a file for each schema."""
