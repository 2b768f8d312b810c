"""Calibrate with activations: collect second moments of linear layers' inputs, and compute the output error they imply.

A linear layer with weight error ``E`` (``[out, in]``) has output error ``E x``. Its expected square is
``sum_ijk E_ij E_ik M_jk`` over the second moments ``M`` of the inputs. With only their diagonal, the mean square of
each input channel, this becomes ``sum_ij M_jj E_ij^2``: exact if channels are uncorrelated, otherwise an estimate. It
is the quantity of Lin et al. 2023, "AWQ", sec. 3; the whole matrix is the Hessian of Frantar et al. 2022, "GPTQ".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from gym_quant.codec import CodecError, as_matrix


@torch.no_grad()
def collect_input_moments(
    model: nn.Module,
    batches: Iterable[Tensor],
    names: Collection[str] | None = None,
    samples: int = 256,
    full: bool = False,
) -> dict[str, Tensor]:
    """Compute second moments of linear layers' inputs over every token of some sequences.

    Args:
        model: Called as ``model(batch)``, temporarily in ``eval`` mode.
        batches: Token ids ``[batch, length]``, without padding.
        names: Parameter names of weights (``...weight``); None for every ``nn.Linear``.
        samples: Maximum number of sequences; the last batch is truncated.
        full: True for all second moments, ``[in, in]``, instead of mean squares: they take ``in`` times the memory and
            give a third less output error (measured; docs/codecs.md).

    Returns:
        ``[in]`` or ``[in, in]`` float32 on the CPU by parameter name, in the order of the model's modules.

    Raises:
        CodecError: If a name is not a linear layer's weight, there is no sequence, or a layer was not reached or had
            an input that is not finite.
    """
    layers = {
        f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    measured = list(layers) if names is None else [name for name in layers if name in names]
    unknown = sorted(set(names or ()) - set(layers))
    if unknown:
        raise CodecError(f"tensor {unknown[0]!r} is not the weight of a linear layer of this model")
    sums = {
        name: torch.zeros((layers[name].in_features,) * (2 if full else 1), dtype=torch.float64)
        for name in measured
    }
    counts = dict.fromkeys(measured, 0)

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
            sums[name] += (seen.T @ seen if full else seen.square().sum(0)).cpu()
            counts[name] += seen.shape[0]

        return hook

    handles = [layers[name].register_forward_pre_hook(hook_of(name)) for name in measured]
    was_training = model.training
    model.eval()
    try:
        used = _run(model, batches, samples)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if not used:
        raise CodecError("no sequence was given for calibration")
    return {name: _mean(name, sums[name], counts[name]) for name in measured}


def output_error(delta: Tensor, decoded: Tensor, moments: Tensor | None = None) -> float:
    """Compute the expected squared error of a layer's output, in float64.

    Args:
        delta: The true delta, ``[..., in]``.
        decoded: The decoded weights, same shape.
        moments: ``[in]`` or ``[in, in]`` from ``collect_input_moments``; None counts every channel as 1, which makes
            this the squared error of the weights.
    """
    cols = as_matrix(tuple(delta.shape))[1]
    lost = decoded.detach().cpu().double().reshape(-1, cols) - delta.detach().cpu().double().reshape(-1, cols)
    if moments is not None and moments.dim() == 2:
        return float(((lost @ moments.detach().cpu().double()) * lost).sum())
    columns = np.square(lost.numpy()).sum(axis=0)
    return float(columns.sum() if moments is None else (columns * moments.double().numpy()).sum())


def _run(model: nn.Module, batches: Iterable[Tensor], samples: int) -> int:
    device = next(model.parameters()).device
    used = 0
    for batch in batches:
        part = batch[: samples - used]
        if part.numel():
            model(part.to(device))
            used += part.shape[0]
        if used >= samples:
            break
    return used


def _mean(name: str, total: Tensor, count: int) -> Tensor:
    if not count:
        raise CodecError(f"layer {name!r} was not reached by the calibration text")
    mean = (total / count).float()
    if not bool(torch.isfinite(mean).all()):
        raise CodecError(f"layer {name!r}: its input is not finite on the calibration text")
    return mean
