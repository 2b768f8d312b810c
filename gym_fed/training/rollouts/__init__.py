"""Answers of the policy from a vLLM next to the trainer: its adapters, requests, and answers ahead of their step."""
