"""How like two texts are: ROUGE-1, ROUGE-2 and ROUGE-L of words, and BLEU-4 of characters; 100 is equal.

The figures that LLaMA-Factory reports of predictions, by the rules of the packages that it uses:

- ROUGE (Lin 2004) as F1 of the *sets* of n-grams, and of the longest common subsequence (rouge-chinese).
- BLEU (Papineni et al. 2002) of one answer against one reference, where an order without a match counts as half, a
  quarter, ... of one match (NIST's smoothing, "method 3" of Chen and Cherry 2014).
- Words as jieba cuts text without Chinese characters: letters and digits stay together, other characters are words of
  their own. A Chinese character is a word here; jieba joins some by its dictionary, so ROUGE of Chinese differs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_BLOCK = re.compile(r"[a-zA-Z0-9+#&._%-]+|\s+|.", re.DOTALL)
_WORD = re.compile(r"([a-zA-Z0-9]+(?:\.[0-9]+)?%?)")
_SENTENCE_END = re.compile(
    r"\n|(?<=[。！？?])(?=[^”’])|(?<=\.{6})(?=[^”’])|(?<=…{2})(?=[^”’])|(?<=[。！？?][”’])(?=[^，。！？?])"
)
_TINY = 1e-8


def similarity(answer: str, reference: str) -> dict[str, float]:
    """``rouge-1``, ``rouge-2``, ``rouge-l`` and ``bleu-4`` of an answer, from 0 to 100, rounded to 4 places."""
    ours, theirs = words(answer), words(reference)
    if any(ours) and any(theirs):
        found = {f"rouge-{n}": _rouge_n(ours, theirs, n) for n in (1, 2)}
        found["rouge-l"] = _f1(longest_common(ours, theirs), len(ours), len(theirs))
    else:
        found = {"rouge-1": 0.0, "rouge-2": 0.0, "rouge-l": 0.0}
    found["bleu-4"] = bleu_4(answer, reference)
    return {name: round(100 * value, 4) for name, value in found.items()}


def words(text: str) -> list[str]:
    """The words of a text, sentence after sentence; a blank line between two paragraphs is an empty word."""
    tokens: list[str] = []
    for block in _BLOCK.findall(text):
        if block.isspace():
            tokens += block
        else:
            tokens += [part for part in _WORD.split(block) if part]
    joined = " ".join(tokens).rstrip()
    sentences = [sentence for sentence in _SENTENCE_END.split(joined) if sentence]
    return [word for sentence in sentences for word in " ".join(sentence.split()).split(" ")]


def bleu_4(answer: str, reference: str) -> float:
    """Sentence BLEU of characters, n-grams up to 4, from 0 to 1."""
    precisions, halvings = [], 0
    for n in range(1, 5):
        ours, theirs = _counts(answer, n), _counts(reference, n)
        total, matches = max(1, sum(ours.values())), sum((ours & theirs).values())
        if n == 1 and matches == 0:
            return 0.0
        if matches == 0:
            halvings += 1
        precisions.append(matches / total if matches else 1 / (2**halvings * total))
    brevity = 1.0 if len(answer) > len(reference) else math.exp(1 - len(reference) / len(answer))
    return brevity * math.exp(math.fsum(math.log(p) for p in precisions) / 4)


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        corner = 0
        for j, other in enumerate(b, 1):
            corner, row[j] = row[j], corner + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def _rouge_n(ours: list[str], theirs: list[str], n: int) -> float:
    sets = [{tuple(part[i : i + n]) for i in range(len(part) - n + 1)} for part in (ours, theirs)]
    return _f1(len(sets[0] & sets[1]), len(sets[0]), len(sets[1]))


def _f1(common: int, ours: int, theirs: int) -> float:
    precision, recall = common / ours if ours else 0.0, common / theirs if theirs else 0.0
    return 2 * precision * recall / (precision + recall + _TINY)


def _counts(text: str, n: int) -> Counter[str]:
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))
