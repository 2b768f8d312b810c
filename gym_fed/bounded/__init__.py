"""Evaluates what a stranger wrote (templates, regular expressions) in a child process with bounds.

A chat template of a model folder, a template or a pattern of an evaluation suite and a pattern of an adapter are
programs: each can loop for ever, fill the memory, or write without end. None of them is evaluated in this process.

Neighbours: imports child_process, errors, text; imported by data, evaluation, export, modeling, models,
serving.
"""
