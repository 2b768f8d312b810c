"""Run transformers' own forward pass over packed tokens, with hooks that add the terms of variants.

transformers' continuous batching is not used, since it masks every token of a step against all keys of all requests.
(For 8 requests of 64 + 32 tokens on one core, it took 1.1 to 1.7 times as long as these steps.) It also lacks logits
for guided decoding, a seed per request, and rows with different variants.

On CUDA, sign terms use a Triton kernel, which is tested in Triton's interpreter, but not on a GPU yet.

When a model is opened, its decoder is checked against this forward pass. If ``decoder`` computes the serving steps,
this forward pass computes the evaluation steps that use the sum of base and delta as weights (``MergedWeights``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward import attention, segments
from gym_fed.serving.forward.active_variants import ModulePlan
from gym_fed.serving.forward.chunk import EmbeddedRows, Position, position_ids
from gym_fed.serving.forward.model_arguments import body_of
from gym_fed.serving.forward.segments import StepRows
from gym_fed.serving.forward.target_modules import ModelLayout, TargetModule


class HookedForward:
    """The hooked forward pass of one model, until ``close``."""

    def __init__(self, model: Any, layout: ModelLayout) -> None:
        attention.register()
        self._model, self._body, self._device = model, body_of(model), torch.device(layout.device)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._old_attention = model.config.get_text_config()._attn_implementation
        try:
            self._attend_by(attention.NAME)
        except BaseException:
            self._attend_by(self._old_attention)
            raise
        self._layers = VariantLayers(model, layout)

    def close(self) -> None:
        """Restore the model."""
        self._layers.remove()
        self._attend_by(self._old_attention)

    def _attend_by(self, name: str) -> None:
        """Set the attention implementation of the language model; a vision tower keeps its own."""
        config = self._model.config
        text = config.get_text_config()
        key = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
        self._model.set_attn_implementation(name if key is None else {key: name})

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int] | Sequence[Position],
        step: StepRows | None,
        wanted: Sequence[int],
        with_states: bool = False,
        pictures: EmbeddedRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass within ``attention.packed``.

        Args:
            token_ids: The token ids of all requests, concatenated.
            positions: The position of each token: its index in the text, or three numbers for M-RoPE (``Position``).
            step: The variants of the rows; None if all rows use the base.
            wanted: The tokens after which logits are computed.
            with_states: Whether to return the last hidden states.
            pictures: Features that replace embeddings after the variants' terms are added.

        Returns:
            Logits ``[wanted, vocabulary]`` float32, and the last hidden states ``[tokens, hidden]``.
        """
        inputs = {
            "input_ids": torch.tensor([list(token_ids)], device=self._device),
            "position_ids": position_ids(positions, self._device),
            "use_cache": False,
        }
        states: list[Tensor] = []
        hooks = []
        if with_states:
            hooks.append(
                self._body.register_forward_hook(
                    lambda _module, _args, output: states.append(output.last_hidden_state[0])
                )
            )
        if pictures is not None:
            embedding = self._model.get_input_embeddings()
            hooks.append(
                embedding.register_forward_hook(lambda _module, _args, output: pictures.put(output[0]))
            )
            hooks += self._layer_hooks(pictures)
        try:
            with self._layers.computing(step):
                if not len(wanted):
                    self._body(**inputs)
                    logits = torch.empty(0, self._vocabulary, device=self._device)
                else:
                    keep = torch.tensor(list(wanted), dtype=torch.int64, device=self._device)
                    logits = self._logits(inputs, keep)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, states[0] if states else None

    def _logits(self, inputs: dict[str, Any], keep: Tensor) -> Tensor:
        """Return the logits after some tokens; a class without ``logits_to_keep`` computes the logits of all tokens."""
        if self._keeps_logits:
            return self._model(**inputs, logits_to_keep=keep).logits[0].to(torch.float32)  # type: ignore[no-any-return]
        return self._model(**inputs).logits[0][keep].to(torch.float32)  # type: ignore[no-any-return]

    def _layer_hooks(self, pictures: EmbeddedRows) -> list[Any]:
        """Return hooks that add the pictures' per-layer features to the outputs of the first layers."""

        def hook(layer: int) -> Callable[..., None]:
            return lambda _module, _args, output: pictures.add(output[0], layer)

        count = pictures.num_layers(self._model.config.get_text_config().hidden_size)
        layers = self._model.get_decoder().layers if count else ()
        return [layers[at].register_forward_hook(hook(at)) for at in range(count)]


class VariantLayers:
    """The hooks of one model, and the parameters that a variant replaces; both are active only within ``computing``."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self.rows: StepRows | None = None
        names = {id(parameter): name for name, parameter in layout.replaceable.items()}
        self._locations: dict[str, list[tuple[nn.Module, str]]] = {}
        """For each replaceable parameter, the modules that have it and its name in them."""
        for module in model.modules():
            for own, parameter in module._parameters.items():
                if (name := names.get(id(parameter))) is not None:
                    self._locations.setdefault(name, []).append((module, own))
        self._handles = []
        for target in layout.target_modules:
            module = model.get_submodule(target.module)
            if target.kind == "linear":
                self._handles.append(module.register_forward_pre_hook(self._before_linear(target)))
            self._handles.append(module.register_forward_hook(self._hook(target)))

    @contextmanager
    def computing(self, rows: StepRows | None) -> Iterator[None]:
        """Compute these rows within the block. A variant with replaced parameters must own all of them.

        Raises:
            GymError: ``USAGE`` if such a variant is one of several.
        """
        old: list[tuple[nn.Module, str, Any]] = []
        variants = () if rows is None else rows.active.variants
        replaced = next((variant for variant in variants if variant.replaced), None)
        if replaced is not None and len(variants) > 1:
            raise GymError(
                ErrorCode.USAGE,
                f"variant {replaced.name!r} replaces parameters, so it cannot share a forward pass",
                "compute its rows in a step of their own",
            )
        self.rows = rows
        try:
            for name, tensor in ({} if replaced is None else replaced.replaced).items():
                for module, own in self._locations[name]:
                    old.append((module, own, module._parameters[own]))
                    module._parameters[own] = tensor  # type: ignore[assignment]
            yield
        finally:
            self.rows = None
            for module, own, parameter in old:
                module._parameters[own] = parameter

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_linear(self, target: TargetModule) -> Any:
        """Return a hook that multiplies by the merged weights if it can; the module itself then gets no rows."""

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
            rows = self.rows
            if rows is None or rows.merged is None or target.weight is None:
                return None
            delta = rows.active.variants[0].weights.get(target.weight)
            rows.product = rows.merged.product(target.module, module, delta, args[0])
            return None if rows.product is None else (args[0][:, :0],)

        return hook

    def _hook(self, target: TargetModule) -> Any:
        adders: dict[str, Callable[..., None]] = {
            "linear": segments.add_linear,
            "embedding": segments.add_embedding,
            "norm": segments.add_norm,
        }
        add = adders[target.kind]

        def hook(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            rows = self.rows
            if rows is None:
                return None
            plan = rows.active.plan(target)
            if plan is None:
                return None
            product, rows.product = rows.product, None
            if product is None:
                add(target, plan, rows, args[0], output)
            else:
                _add_to_merged(plan, rows, product)
            return product

        return hook


def _add_to_merged(plan: ModulePlan, step: StepRows, product: Tensor) -> None:
    for packed in plan.packed:
        step.products[packed.form, "decoded"] += 1
    if plan.biases is not None:
        product += plan.biases[0]
