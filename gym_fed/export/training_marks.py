"""Chat templates without the marks that only transformers reads."""

from __future__ import annotations

import re

_TRAINING_MARKS = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")
"""What transformers adds to jinja2 for training: which tokens are learned. White space at their sides is theirs."""


def without_training_marks(template: str) -> str:
    """A chat template that plain jinja2 reads, and that renders the same."""
    return _TRAINING_MARKS.sub(r"{%\1 if true \2%}{% endif %}", template)
