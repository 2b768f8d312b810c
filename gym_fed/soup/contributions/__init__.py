"""Contribution methods. Each file is one method, and its name is the value in configs."""
