"""Chat templates in training: which one writes a conversation, and which part of its text the assistant wrote."""
