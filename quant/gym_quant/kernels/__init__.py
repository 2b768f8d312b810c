"""Kernels for one-bit deltas: packing, encoding, counting, and a matmul with a separate delta per row.

Each function here has a torch reference (``reference``) and native code for AVX-512, AVX2 and plain C++ (``native``).
``path()`` returns the path in use; ``using(...)`` and the environment variable ``GYM_KERNELS`` choose another. Results
do not depend on the path or the number of threads: integers, bits, encoded scales and decoded values are bit-identical,
and so are the native paths of ``signed_matmul``, whose exact torch reference adds in a different order (see there).
"""

from gym_quant.kernels.attention import BLOCK_TOKENS, KV_DTYPES, PagedLayer, PagedSpans, attend
from gym_quant.kernels.dispatch import available, describe, path, using
from gym_quant.kernels.lookup import MODES
from gym_quant.kernels.matmul import signed_matmul
from gym_quant.kernels.mixing import (
    hamming,
    majority,
    sign_products,
    signed_combination,
    signed_trimmed,
    signed_votes,
    votes,
)
from gym_quant.kernels.order import (
    linear_combination,
    linear_combinations,
    mean_around_median,
    median,
    products,
    trimmed_mean,
    weighted_trimmed_mean,
)
from gym_quant.kernels.resident import BoundTerms, ResidentSigns, SignBatch
from gym_quant.kernels.sign_matrix import SignMatrix
from gym_quant.kernels.signs import decode_signs, encode_signs, pack_signs, unpack_signs

__all__ = [
    "BLOCK_TOKENS",
    "KV_DTYPES",
    "MODES",
    "BoundTerms",
    "PagedLayer",
    "PagedSpans",
    "ResidentSigns",
    "SignBatch",
    "SignMatrix",
    "attend",
    "available",
    "decode_signs",
    "describe",
    "encode_signs",
    "hamming",
    "linear_combination",
    "linear_combinations",
    "majority",
    "mean_around_median",
    "median",
    "pack_signs",
    "path",
    "products",
    "sign_products",
    "signed_combination",
    "signed_matmul",
    "signed_trimmed",
    "signed_votes",
    "trimmed_mean",
    "unpack_signs",
    "using",
    "votes",
    "weighted_trimmed_mean",
]
