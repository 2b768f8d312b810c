"""Translates ``optim`` and the ``use_...`` switches to our optimiser and its arguments."""

from __future__ import annotations

from typing import Any

from gym_fed.interop.llamafactory.translation import Translator

_NAMES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "lion_32bit": "lion",
    "paged_adamw_32bit": "paged_adamw",
    "paged_lion_32bit": "paged_lion",
    "schedule_free_adamw": "schedulefree_adamw",
    "schedule_free_sgd": "schedulefree_sgd",
    "schedule_free_radam": "schedulefree_radam",
}
_SWITCHES = {
    "use_galore": "galore_adamw",
    "use_apollo": "apollo_adamw",
    "use_badam": "badam",
    "use_adam_mini": "adam_mini",
    "use_muon": "muon",
}
_PROJECTED = {
    "galore": {"rank": 16, "update_interval": 200, "scale": 2.0, "proj_type": "std"},
    "apollo": {
        "rank": 16,
        "update_interval": 200,
        "scale": 32.0,
        "proj": "random",
        "proj_type": "std",
        "scale_type": "channel",
    },
}
_BADAM = {
    "switch_mode": ("badam_switch_mode", "ascending"),
    "switch_block_every": ("badam_switch_interval", 50),
    "start_block": ("badam_start_block", None),
}
_READ_BY = {"galore_": "use_galore", "apollo_": "use_apollo", "badam_": "use_badam"}


def translate_optimizer(translator: Translator) -> None:
    """Write ``optimizer`` and ``optimizer_args``."""
    base = str(translator.take("optim", "adamw_torch"))
    translator.put("optimizer", _NAMES.get(base, base), "optim")
    translator.lose_if("optim_args", "write them as optimizer_args")
    translator.lose_if("optim_target_modules", "the projected optimisers take every linear layer")
    epsilon = translator.take("adam_epsilon", 1e-8)
    if float(epsilon) != 1e-8:
        translator.put("optimizer_args.eps", float(epsilon), "adam_epsilon")
    for switch, ours in _SWITCHES.items():
        if not translator.take(switch, False):
            continue
        translator.put("optimizer", ours, switch)
        if switch == "use_badam":
            _badam(translator)
        elif (family := switch.removeprefix("use_")) in _PROJECTED:
            _projected(translator, family, base)
    for key in translator.untaken():
        for start, switch in _READ_BY.items():
            if key.startswith(start) and key != "badam_verbose":
                translator.take(key)
                translator.note(key, f"read with {switch} only")


def _projected(translator: Translator, family: str, base: str) -> None:
    """GaLore and APOLLO."""
    if family == "galore" and "8bit" in base:
        translator.put("optimizer", "galore_adamw_8bit", "optim")
    elif family == "galore" and base == "adafactor":
        translator.put("optimizer", "galore_adafactor", "optim")
    for name, default in _PROJECTED[family].items():
        ours = "update_proj_gap" if name == "update_interval" else name
        key = f"{family}_{name}"
        value: Any = translator.take(key, default)
        translator.put(f"optimizer_args.{ours}", value, key)
    translator.lose_if(f"{family}_target", "every linear layer is projected", harmless=("all", ["all"]))
    if translator.take(f"{family}_layerwise", False):
        translator.note(
            f"{family}_layerwise", "layers are updated together: the result is the same, the memory is not"
        )
    if family == "apollo":
        translator.lose_if("apollo_scale_front", "the norm-growth limiter comes after the scaling")


def _badam(translator: Translator) -> None:
    mode = str(translator.take("badam_mode", "layer"))
    if mode != "layer":
        translator.lose("badam_mode", f"{mode} is not offered, only layer")
    for ours, (key, default) in _BADAM.items():
        value = translator.take(key, default)
        if value is not None:
            translator.put(f"optimizer_args.{ours}", value, key)
    for key in ("badam_update_ratio", "badam_mask_mode", "badam_verbose"):
        translator.take(key)
