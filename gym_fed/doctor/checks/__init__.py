"""The checks of `gym doctor`, one per module."""
