"""Prefix trees of texts: each common prefix is computed once.

The choices of a question share the question, and the questions of a task share its examples. A node contains the
tokens that its texts have in common; a text is the path from the root to its last node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

LEAST_SHARED = 8
"""Minimum common tokens of a branch."""
MAX_REPEATED = 32
"""Common tokens that may be recomputed for each branch to split a large tree into small ones."""


@dataclass(frozen=True)
class ScoredText:
    """A tokenized text whose last tokens are scored.

    Attributes:
        place: The index in the request.
        ids: Inputs of the model: context and continuation without the last token.
        targets: The continuation; ``targets[-1]`` follows ``ids``.
        cut: Tokens that were left out before ``ids``.
    """

    place: int
    ids: tuple[int, ...]
    targets: tuple[int, ...]
    cut: int

    @property
    def first_scored(self) -> int:
        """The position whose logits predict the first of ``targets``."""
        return len(self.ids) - len(self.targets)


@dataclass
class TreeNode:
    """The tokens ``[begin, end)`` shared by all of ``texts``.

    Attributes:
        children: Child nodes, with which some of the texts continue.
    """

    begin: int
    end: int
    texts: Sequence[ScoredText]
    children: list[TreeNode] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return list(self.texts[0].ids[self.begin : self.end])

    @property
    def num_logits(self) -> int:
        """The number of last tokens that some text is scored after."""
        return max(0, self.end - max(self.begin, min(text.first_scored for text in self.texts)))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the node and all below it."""
        return self.end - self.begin + sum(child.num_tokens for child in self.children)


@dataclass(frozen=True)
class FlatTree:
    """A tree flattened to one sequence of tokens.

    Attributes:
        nodes: A node before what follows it.
        token_ids: The tokens of all nodes.
        positions: The position of each token in its texts.
        wanted: The tokens after which some text is scored.
        visible: ``[tokens, tokens] bool``: which tokens (columns) lie on the way to a token (row), itself among them.
    """

    nodes: list[TreeNode]
    token_ids: list[int]
    positions: list[int]
    wanted: list[int]
    visible: np.ndarray


def flat(root: TreeNode) -> FlatTree:
    """Flatten the tree below a node."""
    size = root.num_tokens
    flattened = FlatTree([], [], [], [], np.zeros((size, size), dtype=bool))
    waiting: list[tuple[TreeNode, int]] = [(root, -1)]  # with the place of the token before it
    while waiting:
        node, before = waiting.pop()
        start, length = len(flattened.token_ids), node.end - node.begin
        stop = start + length
        flattened.nodes.append(node)
        flattened.token_ids.extend(node.token_ids)
        flattened.positions.extend(range(node.begin, node.end))
        flattened.wanted.extend(range(stop - node.num_logits, stop))
        if before >= 0:
            flattened.visible[start:stop] = flattened.visible[before]
        flattened.visible[start:stop, start:stop] = np.tri(length, dtype=bool)
        waiting += [(child, stop - 1) for child in reversed(node.children)]
    return flattened


def windows(texts: Sequence[ScoredText], max_tokens: int) -> Iterator[list[ScoredText]]:
    """Sort texts by tokens, which keeps common prefixes together, and split them by ``max_tokens``."""
    part: list[ScoredText] = []
    tokens = 0
    for text in sorted(texts, key=lambda text: text.ids):
        new = len(text.ids) - (common(part[-1].ids, text.ids) if part else 0)
        if part and tokens + new > max_tokens:
            yield part
            part, tokens, new = [], 0, len(text.ids)
        part.append(text)
        tokens += new
    if part:
        yield part


def tree(texts: Sequence[ScoredText], max_tokens: int) -> list[TreeNode]:
    """Build the tree of sorted texts and return its first nodes. No node has more than ``max_tokens``."""
    first: list[TreeNode] = []
    open_levels: list[tuple[Sequence[ScoredText], int, list[TreeNode]]] = [(texts, 0, first)]
    while open_levels:
        some, begin, nodes = open_levels.pop()
        for end, alike in _parts(some, begin, max_tokens):
            node = TreeNode(begin, end, alike)
            nodes.append(node)
            if longer := [text for text in alike if len(text.ids) > end]:
                open_levels.append((longer, end, node.children))
    return first


def parted(root: TreeNode, most: int) -> list[TreeNode]:
    """Split a tree of more than ``most`` tokens into several with copies of the first tokens."""
    if root.num_tokens <= most or root.end - root.begin > MAX_REPEATED or not root.children:
        return [root]
    ended = [text for text in root.texts if len(text.ids) == root.end]
    trees = [TreeNode(root.begin, root.end, ended)] if ended else []
    for child in root.children:
        trees += parted(TreeNode(root.begin, child.end, child.texts, child.children), most)
    return trees if most else [root]


def common(first: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts."""
    most = min(len(first), len(other))
    if first[:most] == other[:most]:
        return most
    low, high = 0, most  # one[:low] is equal, one[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _parts(
    texts: Sequence[ScoredText], begin: int, max_tokens: int
) -> Iterator[tuple[int, Sequence[ScoredText]]]:
    """Group texts that share the prefix up to ``begin`` by their next token, with the length of the shared part."""
    first = 0
    while first < len(texts):
        end, last = len(texts[first].ids), first + 1
        while last < len(texts):
            alike = min(end, common(texts[first].ids, texts[last].ids))
            if alike == begin or (alike - begin < LEAST_SHARED and alike < len(texts[first].ids)):
                break
            end, last = alike, last + 1
        yield min(end, begin + max_tokens), texts[first:last]
        first = last
