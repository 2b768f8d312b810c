"""Evaluate untrusted templates, regular expressions and JSON schemas in a child process with limits.

Chat templates of model folders, templates and patterns of evaluation suites, and patterns of adapters are programs.
They can loop forever, exhaust the memory, or produce endless output, so none of them is evaluated in the calling
process.
"""
