"""Several processes of one run: launched, agreed with, and the model split among them."""
