"""Model stock: the mean, interpolated towards the base the more the fine-tunes disagree.

Jang et al. 2024, "Model Stock: All we need is just a few fine-tuned models", eq. 2.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from gym_fed.soup.method import MergeMethod, TensorTask
from gym_fed.soup.methods._task_vectors import combination, inner_products

if TYPE_CHECKING:
    from torch import Tensor


class ModelStock(MergeMethod):
    """``t * mean(delta)`` with ``t = n cos / (1 + (n - 1) cos)`` per tensor.

    Under the paper's model (fine-tunes on a sphere about a centre, at equal angles seen from the base) this is the
    point nearest to the centre. ``cos`` is the mean over all pairs, as in mergekit; the paper's angles are equal. A
    pair with an unchanged tensor counts as orthogonal. If ``cos`` is not positive the model does not apply, and t is 0,
    which gives the base; mergekit's t leaves [0, 1] there.
    """

    name = "model_stock"
    weighted = False
    minimum = 2

    def _merge(self, task: TensorTask) -> Tensor:
        count = len(task.deltas)
        products = inner_products(task.deltas)
        norms = products.diagonal().sqrt().tolist()
        cosines = [
            float(products[i, j]) / (norms[i] * norms[j]) if norms[i] and norms[j] else 0.0
            for i, j in itertools.combinations(range(count), 2)
        ]
        cosine = min(1.0, max(0.0, math.fsum(cosines) / len(cosines)))
        t = count * cosine / (1.0 + (count - 1) * cosine)
        return combination(task.deltas, task.shares * t)
