"""Windows of texts as forward passes shared by all models, and sums of log-likelihoods by node.

Short trees are computed whole, many in a forward, where each token attends to those on its path from the root. A
large tree is computed node by node with the KV cache of its parent (``local``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.scoring.scorer import Loglikelihood
from gym_fed.evaluation.scoring.tree import FlatTree, ScoredText, TreeNode, flat, parted, tree
from gym_fed.serving.forward.padded import TreeAttention

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.serving.forward.multi_variant import MultiVariantModel

MAX_TOKENS = 2048
"""Maximum tokens of a tree computed as a whole, which may exceed other forwards' limit."""


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
    wanted: list[int]
    attention: TreeAttention
    targets: Targets


class Window:
    """The forward passes of some texts.

    Args:
        texts: Sorted by their tokens.
        served: The base.
        step_tokens: Maximum tokens of a forward.
        most_rows: Most rows of logits of a forward.

    Attributes:
        together: Forwards of whole trees.
        large: First nodes of the other trees.
    """

    def __init__(
        self, texts: Sequence[ScoredText], served: MultiVariantModel, step_tokens: int, most_rows: int
    ) -> None:
        self.texts = texts
        self._number = {text.place: number for number, text in enumerate(texts)}
        self._device = served.device
        most = min(MAX_TOKENS, 2 * step_tokens) if served.attends_plainly else 0
        trees = [one for root in tree(texts, step_tokens) for one in parted(root, most)]
        small = [flat(root) for root in trees if root.num_tokens <= most]
        small = [one for one in small if len(one.wanted) <= most_rows]
        whole = {id(one.nodes[0]) for one in small}
        self.large = [root for root in trees if id(root) not in whole]
        self.together: list[TreeStep] = []
        part: list[FlatTree] = []
        for one in sorted(small, key=lambda found: -len(found.token_ids)):
            tokens = sum(len(other.token_ids) for other in (*part, one))
            rows = sum(len(other.wanted) for other in (*part, one))
            if part and (tokens > step_tokens or rows > most_rows):
                self.together.append(self._step(part, served))
                part = []
            part.append(one)
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
            indices += [len(token_ids) + place for place in root.wanted]
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
                "leave it out, or train it again",
            )
        values, greedy = self._logprobs.tolist(), self._greedy.tolist()
        return {
            text.place: Loglikelihood(values[number], greedy[number], text.cut)
            for number, text in enumerate(self._texts)
        }
