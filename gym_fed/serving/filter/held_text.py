"""Holds back the end of a growing text until no rule can match it, however it is cut into pieces.

A match has ``width`` folded characters at most. So whatever lies further than that before the end of the text can be
in no match that is still to come. One that touches the end waits for the next character, which may make another word
of it.
"""

from __future__ import annotations

from gym_fed.serving.filter.folding import FOLDS, fold
from gym_fed.serving.filter.rules import Rules


class HeldText:
    """One answer's text, of which the end is held.

    Args:
        rules: That it is compared with.
        before: What the text continues: a match may begin in it, but not end in it.

    Attributes:
        category: Of the rule that matched; from then on nothing leaves any more.
    """

    def __init__(self, rules: Rules, before: str = "") -> None:
        self.category: str | None = None
        self._rules = rules
        self._width = rules.width
        context = fold(before)[-self._width - 1 :]
        self._folded = context
        self._starts = [0] * len(context)  # where in ``_text`` each folded character comes from
        self._context = len(context)  # of the folded characters, those that are not held
        self._begins = 0  # first place where a match may begin: one in what has left was looked for before
        self._text = ""

    def push(self, text: str, *, last: bool = False) -> str:
        """Take the next text; returns what may leave. With ``last`` that is all, unless a rule matches."""
        if self.category is not None:
            return ""
        if not self._width:
            return text
        self._take(text)
        size = len(self._folded)
        until = size if last else size - 1
        self.category = self._rules.find_within(self._folded, self._begins, self._context, until)
        if self.category is not None:
            self._text = ""
            return ""
        if last:
            out, self._text = self._text, ""
            return out
        return self._release(size - self._width)

    def _take(self, text: str) -> None:
        folded, blank = [self._folded], self._folded.endswith(" ")
        for place, character in enumerate(text, len(self._text)):
            for one in FOLDS[ord(character)]:
                if one == " " and blank:
                    continue
                blank = one == " "
                folded.append(one)
                self._starts.append(place)
        self._text += text
        self._folded = "".join(folded)

    def _release(self, count: int) -> str:
        """Let the first ``count`` folded characters go, and their text; the last of them stays as context."""
        while 0 < count < len(self._starts) and self._starts[count] == self._starts[count - 1]:
            count -= 1  # one character became several
        if count <= self._context:
            return ""
        cut = self._starts[count]
        out, self._text = self._text[:cut], self._text[cut:]
        self._folded = self._folded[count - 1 :]
        self._starts = [max(0, place - cut) for place in self._starts[count - 1 :]]
        self._context = self._begins = 1
        return out
