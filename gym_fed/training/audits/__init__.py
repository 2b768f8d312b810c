"""Record the steps of a training, and repeat single ones to check them."""
