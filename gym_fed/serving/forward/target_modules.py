"""Find the target modules of a base, which variants may change, and how each of them uses its parameters.

Class names are not trusted. Two small forward passes show which modules see every token once, and along which axis; a
norm's formula is checked on the norm itself. A parameter for which this fails (experts, convolutions, SSM parameters)
is replaced as a whole, in forward passes of one variant. Variants cannot change parameters outside the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from gym_fed.serving.forward.model_arguments import CacheArgument, accepted, first_ids, text_arguments

Kind = Literal["matrix", "transposed", "norm", "bias", "replaced"]

_LONG, _SHORT = 5, 3
_FORMS: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")


@dataclass(frozen=True)
class TargetParameter:
    """One parameter of the base.

    Attributes:
        shape: The shape of the parameter.
        kind: ``matrix`` of a linear layer, an embedding or both; ``transposed`` (GPT-2's Conv1D), ``norm``, ``bias``;
            ``replaced`` for all others (experts, convolutions, state).
        refusal: Why variants may not change it; empty if they may.
    """

    shape: tuple[int, ...]
    kind: Kind
    refusal: str = ""


@dataclass(frozen=True)
class TargetModule:
    """A module whose output gets the terms of variants.

    Attributes:
        module: The name of the module.
        kind: The kind of computation.
        weight: The name of its weight among the base's parameters; that of the embedding for a tied head.
        bias: The name of its bias.
        token_axis: The token axis of a norm's input.
        normalised: The normalisation whose result a norm multiplies by its weight.
        eps: The norm's epsilon.
        multiplier: The factor that an embedding applies to its rows.
        head: True if it receives only the tokens whose logits are needed.
    """

    module: str
    kind: Literal["linear", "embedding", "norm"]
    weight: str | None
    bias: str | None
    token_axis: int = 1
    normalised: Literal["rms", "layer"] = "rms"
    eps: float = 0.0
    multiplier: float = 1.0
    head: bool = False


@dataclass(frozen=True)
class ModelLayout:
    """The layout of a base, for ``load_variant_weights`` and the multi-variant step; immutable.

    Attributes:
        parameters: Every parameter, under its name in ``model_tensors``.
        target_modules: The modules to which terms are added.
        dtype: The dtype of the base: ``float32`` or ``bfloat16``.
        device: The device of the weights.
        kernel: The kernel for sign deltas: ``exact``, ``lookup`` or ``lookup16``.
        replaceable: The base's own tensors of the parameters of kind ``replaced``.
    """

    parameters: Mapping[str, TargetParameter]
    target_modules: tuple[TargetModule, ...]
    dtype: str
    device: str
    kernel: str = "exact"
    replaceable: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, kernel: str = "exact", *, cached: bool = False) -> ModelLayout:
        """Inspect a transformers causal LM by running it on a few tokens.

        Args:
            model: The model.
            kernel: The kernel for sign deltas.
            cached: Whether to use the model's cache as well; some modules then see earlier tokens again (Kimi-Linear),
                or are not called for a single token.
        """
        parameters = dict(model.named_parameters())
        first = next(iter(parameters.values()))
        long, short = _watched(model, _LONG), _watched(model, _SHORT)
        keeps = {"logits_to_keep": _SHORT} if "logits_to_keep" in accepted(model) else {}
        kept = _watched(model, _LONG, **keeps)
        single = _watched_decode(model) if cached else None
        names = {id(p): name for name, p in parameters.items()}
        target_modules: list[TargetModule] = []
        refusals: dict[str, str] = {}
        kinds: dict[str, Kind] = {}
        for name, module in model.named_modules():
            own = {k: names[id(p)] for k, p in module.named_parameters(recurse=False)}
            if not own:
                continue
            target, why = _target_module(
                name, module, own, long.get(name, []), short.get(name, []), kept.get(name, [])
            )
            if target is not None and single is not None:
                shape = list(long[name][0][0].shape)
                shape[target.token_axis] = 1
                if [list(given.shape) for given, _ in single.get(name, [])] != [shape] * len(long[name]):
                    target, why = None, f"{type(module).__name__} {name!r} is not called for each new token"
            if target is not None:
                target_modules.append(target)
            for key, parameter in own.items():
                if target is None or parameter not in (target.weight, target.bias):
                    refusals[parameter] = (
                        why
                        or f"{type(module).__name__} {name!r} uses its {key} unlike a linear layer, embedding or norm"
                    )
                else:
                    kinds[parameter] = _kind(target, key, module)
        served = _language_parameters(model)
        targets = {
            name: TargetParameter(
                tuple(p.shape),
                "replaced" if name in refusals else kinds[name],
                refusals.get(name, "") if id(p) not in served else "",
            )
            for name, p in parameters.items()
        }
        replaceable = {
            name: parameters[name]
            for name, target in targets.items()
            if target.kind == "replaced" and not target.refusal
        }
        dtype = str(first.dtype).removeprefix("torch.")
        return cls(targets, tuple(target_modules), dtype, str(first.device), kernel, replaceable)


def _language_parameters(model: Any) -> set[int]:
    """Return the ids of the parameters that compute the tokens of text."""
    parts = [model]
    if model.config.get_text_config() is not model.config:
        parts = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(p) for part in parts if part is not None for p in part.parameters()}


_Calls = dict[str, list[tuple[Tensor, Tensor]]]


def _watched(model: Any, tokens: int, **arguments: Any) -> _Calls:
    """Record the calls of modules in a forward pass of one text without a cache."""
    with _recorded(model) as calls:
        model(**text_arguments(model, first_ids(model, tokens)), **arguments)
    return calls


def _watched_decode(model: Any) -> _Calls | None:
    """Record the calls of modules in a forward pass of one more token; None if the model has no cache."""
    cache, ids = CacheArgument(model), first_ids(model, _LONG + 1)
    if cache.name is None:
        return None  # without a cache, every forward pass computes a whole text
    arguments = text_arguments(model, ids[:_LONG]) | cache.arguments(None)
    after = cache.of(model(**arguments), arguments)
    with _recorded(model) as calls:
        model(**text_arguments(model, ids[_LONG:], _LONG) | cache.arguments(after))
    return calls


@contextmanager
def _recorded(model: nn.Module) -> Iterator[_Calls]:
    """Record input and output of every call of a module that has parameters, in order of the first call."""
    calls: _Calls = {}
    handles = []
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):

            def note(
                _module: nn.Module, args: tuple[Any, ...], more: dict[str, Any], output: Any, name: str = name
            ) -> None:
                others = [*args[1:], *more.values()]  # such as the gate of a gated norm
                alone = (
                    args and isinstance(args[0], Tensor) and not any(isinstance(o, Tensor) for o in others)
                )
                if alone and isinstance(output, Tensor):
                    # Cloned, since CTRL multiplies its embedding's output in place.
                    calls.setdefault(name, []).append((args[0].clone(), output.clone()))

            handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _target_module(
    name: str,
    module: nn.Module,
    own: dict[str, str],
    long: list[tuple[Tensor, Tensor]],
    short: list[tuple[Tensor, Tensor]],
    kept: list[tuple[Tensor, Tensor]],
) -> tuple[TargetModule | None, str]:
    """Return the target module for a module, or None with the reason why terms cannot be added to it."""
    shown = f"{type(module).__name__} {name!r}"
    if not long or len(long) != len(short):
        return None, f"{shown} is not called {'once for all tokens' if long else 'for tokens of text'}"
    axes = {_token_axis(a[0].shape, b[0].shape) for a, b in zip(long, short, strict=True)}
    axis = axes.pop() if len(axes) == 1 else None
    if axis is None:
        return None, f"{shown} does not process every token exactly once"
    input, output = long[0]
    head = bool(kept) and kept[0][0].shape[axis] == _SHORT
    weight, bias = own.get("weight"), own.get("bias")
    if _is_linear(module, input, output):
        if input.numel() != _LONG * input.shape[-1]:
            return None, f"{shown} multiplies only parts of a token"
        return TargetModule(name, "linear", weight, bias, axis, head=head), ""
    if isinstance(module, nn.Embedding):
        return _embedding(name, module, weight, input, output)
    if weight is not None and module.get_parameter("weight").ndim == 1:
        target, why = _norm(name, module, weight, bias, axis, input)
        return target and replace(target, head=head), why
    return None, f"{shown} is not a linear layer, embedding or norm"


def _embedding(
    name: str, module: nn.Embedding, weight: str | None, given: Tensor, output: Tensor
) -> tuple[TargetModule | None, str]:
    """Recognise an embedding, which returns rows of its weight, possibly multiplied by one number (Gemma)."""
    shown = f"{type(module).__name__} {name!r}"
    if given.numel() != _LONG or given.dtype.is_floating_point or module.max_norm is not None:
        return None, f"{shown} does not look up one row per token"
    rows, given_output = module.weight[given].double(), output.double()
    square = float((rows * rows).sum())
    multiplier = float((rows * given_output).sum()) / square if square else 1.0
    if rows.shape != given_output.shape or not _close(given_output, rows * multiplier, output.dtype):
        return None, f"{shown} does more than multiply its rows by one number"
    return TargetModule(
        name, "embedding", weight, None, multiplier=1.0 if abs(multiplier - 1) < 1e-6 else multiplier
    ), ""


def _norm(
    name: str, module: nn.Module, weight: str | None, bias: str | None, axis: int, given: Tensor
) -> tuple[TargetModule | None, str]:
    """Recognise a norm by ``f(x; w + d) = f(x; w) + d * n(x)``, with ``n`` the RMS or the layer norm."""
    shown = f"{type(module).__name__} {name!r}"
    eps = next((float(getattr(module, k)) for k in ("variance_epsilon", "eps") if hasattr(module, k)), None)
    own = {k: p.detach() for k, p in module.named_parameters(recurse=False)}
    size = own["weight"].shape[0]
    if eps is None or given.shape[-1] != size:
        return None, f"{shown} is not a norm over the last dimension"
    generator = torch.Generator().manual_seed(0)
    step = torch.randn(size, generator=generator).to(given.device, own["weight"].dtype)
    before = functional_call(module, own, (given,)).double()
    after = functional_call(module, {**own, "weight": own["weight"] + step}, (given,)).double()
    for kind in _FORMS:
        expected = before + step.double() * normal_form(given, kind, eps).double()
        if _close(after, expected, given.dtype):
            return TargetModule(name, "norm", weight, bias, axis, kind, eps), ""
    return None, f"{shown} is neither an RMS norm nor a layer norm"


def normal_form(x: Tensor, kind: Literal["rms", "layer"], eps: float) -> Tensor:
    """Return the value that a norm multiplies by its weight, in float32."""
    wide, size = x.to(torch.float32), (x.shape[-1],)
    if kind == "rms":
        return functional.rms_norm(wide, size, eps=eps)
    return functional.layer_norm(wide, size, eps=eps)


def _kind(target: TargetModule, key: str, module: nn.Module) -> Kind:
    if key == "bias":
        return "bias"
    if target.kind == "norm":
        return "norm"
    return "transposed" if not isinstance(module, nn.Linear | nn.Embedding) else "matrix"


def _is_linear(module: nn.Module, given: Tensor, output: Tensor) -> bool:
    if isinstance(module, nn.Linear):
        if type(module).forward is nn.Linear.forward:
            return True
        product = functional.linear(given, module.weight, module.bias)  # Falcon has its own class
        return product.shape == output.shape and _close(output.double(), product.double(), given.dtype)
    if not type(module).__module__.startswith("transformers."):
        return False
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D) and type(module).forward is Conv1D.forward


def _token_axis(long: torch.Size, short: torch.Size) -> int | None:
    axes = [i for i, (a, b) in enumerate(zip(long, short, strict=False)) if a != b]
    if len(long) == len(short) and [(long[i], short[i]) for i in axes] == [(_LONG, _SHORT)]:
        return axes[0]
    return None


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    most = float(expected.abs().max())
    return bool(((actual - expected).abs().max() <= tolerance * max(most, 1e-6)).item())
