"""Windows of texts as forward passes shared by all models, and sums of log-likelihoods by node.

Short trees are computed as a whole, many per forward pass, and each token attends to the tokens on its path from the
root. A large tree is computed node by node, each with the KV cache of its parent (``local``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.scoring.scorer import Loglikelihood
from gym_fed.serving.forward.padded import TreeAttention

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.serving.forward.multi_variant import MultiVariantModel


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
        children: Child nodes, which continue some of the texts.
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
        nodes: The nodes, parents before children.
        token_ids: The tokens of all nodes.
        positions: The position of each token in its texts.
        scored: Indices of the tokens after which some text is scored.
        visible: ``[tokens, tokens] bool``: True if a token (column) is on the path to a token (row), including itself.
    """

    nodes: list[TreeNode]
    token_ids: list[int]
    positions: list[int]
    scored: list[int]
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
        flattened.scored.extend(range(stop - node.num_logits, stop))
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
    """Build the trees of sorted texts and return their root nodes. No node has more than ``max_tokens``."""
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


MAX_TOKENS = 2048
"""Maximum number of tokens of a tree computed as a whole, which may exceed other forwards' limit."""


@dataclass(frozen=True)
class Targets:
    """The values to read from logits: row, token and text index of each scored token."""

    row: Tensor
    token: Tensor
    owner: Tensor


@dataclass(frozen=True)
class TreeStep:
    """A forward pass of whole trees."""

    token_ids: list[int]
    positions: list[int]
    scored: list[int]
    attention: TreeAttention
    targets: Targets


class Window:
    """The forward passes of some texts.

    Args:
        texts: Sorted by their tokens.
        step_tokens: Maximum number of tokens of a forward.
        most_rows: Maximum number of rows of logits of a forward.

    Attributes:
        together: Forwards of whole trees.
        large: Root nodes of the large trees.
    """

    def __init__(
        self, texts: Sequence[ScoredText], served: MultiVariantModel, step_tokens: int, most_rows: int
    ) -> None:
        self.texts = texts
        self._number = {text.place: number for number, text in enumerate(texts)}
        self._device = served.device
        most = min(MAX_TOKENS, 2 * step_tokens) if served.attends_plainly else 0
        trees = [flat_tree for root in tree(texts, step_tokens) for flat_tree in parted(root, most)]
        small = [flat(root) for root in trees if root.num_tokens <= most]
        small = [flat_tree for flat_tree in small if len(flat_tree.scored) <= most_rows]
        small_roots = {id(flat_tree.nodes[0]) for flat_tree in small}
        self.large = [root for root in trees if id(root) not in small_roots]
        self.together: list[TreeStep] = []
        part: list[FlatTree] = []
        for flat_tree in sorted(small, key=lambda flat_tree: -len(flat_tree.token_ids)):
            tokens = sum(len(other.token_ids) for other in (*part, flat_tree))
            rows = sum(len(other.scored) for other in (*part, flat_tree))
            if part and (tokens > step_tokens or rows > most_rows):
                self.together.append(self._step(part, served))
                part = []
            part.append(flat_tree)
        if part:
            self.together.append(self._step(part, served))

    def targets(self, nodes: Sequence[TreeNode]) -> Targets:
        """Return the targets in concatenated logits of nodes' last tokens."""
        rows: list[int] = []
        tokens: list[int] = []
        owners: list[int] = []
        start = 0
        for node in nodes:
            begin = node.end - node.num_logits  # the position of its first row
            for text in node.texts:
                for position in range(max(begin, text.first_scored), node.end):
                    rows.append(start + position - begin)
                    tokens.append(text.targets[position - text.first_scored])
                    owners.append(self._number[text.place])
            start += node.num_logits
        row, token, owner = (
            torch.tensor(values, dtype=torch.int64, device=self._device) for values in (rows, tokens, owners)
        )
        return Targets(row, token, owner)

    def _step(self, trees: Sequence[FlatTree], served: MultiVariantModel) -> TreeStep:
        token_ids: list[int] = []
        indices: list[int] = []
        for root in trees:
            indices += [len(token_ids) + place for place in root.scored]
            token_ids += root.token_ids
        positions = [place for root in trees for place in root.positions]
        attention = TreeAttention([root.visible for root in trees], served.dtype, served.device)
        targets = self.targets([node for root in trees for node in root.nodes])
        return TreeStep(token_ids, positions, indices, attention, targets)


class Sums:
    """The log-likelihoods of a window's texts under one model."""

    def __init__(self, window: Window, device: torch.device) -> None:
        self._texts = window.texts
        self._logprobs = torch.zeros(len(window.texts), dtype=torch.float64, device=device)
        self._greedy = torch.ones(len(window.texts), dtype=torch.bool, device=device)

    @torch.inference_mode()
    def add(self, targets: Targets, logits: Tensor) -> None:
        """Add the logits ``[rows, vocabulary]`` of the targets."""
        if not len(targets.row):
            return
        logprobs = logits[targets.row, targets.token] - torch.logsumexp(logits, dim=1)[targets.row]
        self._logprobs.index_add_(0, targets.owner, logprobs.to(torch.float64))
        wrong = targets.owner[logits.argmax(dim=1)[targets.row] != targets.token]
        self._greedy[wrong] = False

    def results(self, name: str) -> dict[int, Loglikelihood]:
        """Return the results by index.

        Raises:
            GymError: ``MODEL_INVALID``.
        """
        if not bool(torch.isfinite(self._logprobs).all()):
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{name}: its log-likelihoods are not finite",
                "omit it, or train it again",
            )
        values, greedy = self._logprobs.tolist(), self._greedy.tolist()
        return {
            text.place: Loglikelihood(values[number], greedy[number], text.cut)
            for number, text in enumerate(self._texts)
        }
