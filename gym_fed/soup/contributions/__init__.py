"""Ways to share a round's value among its updates; every file is one, and its name is the one in configs."""
