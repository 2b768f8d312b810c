"""Chat templates for training: choose the template, render conversations, and locate the assistant's text."""
