"""Commands and flags of other tools, rewritten into ours with a note before parsing, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gym_fed.core.aliases import note
from gym_fed.interop import evaluation
from gym_fed.interop.draft import Alias
from gym_fed.interop.flags import as_settings, split_flags

RENAMED = {"inference": "batch", "serve": "api", "run": "chat"}
"""Our commands by theirs."""


_OF_A_MODEL = {"model_name_or_path": "MODEL", "model": "MODEL", "adapter_name_or_path": "--adapter"}
_OF_A_BASE = {"model_name_or_path": "--base", "model": "--base", "adapter_name_or_path": "--adapter"}
_NOT_NEEDED = {
    "template": "not needed (the tokenizer has its template)",
    "finetuning_type": "not needed (the adapter's config has it)",
    "trust_remote_code": "not needed (code that comes with a model is never run)",
}
"""Flags that commands do not need, since the model or adapter determines them."""

_SAMPLING = (
    *("top_p", "top_k", "min_p", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Keys of ``gym chat --set`` that are flags in other tools."""

FLAGS: dict[str, dict[str, str]] = {
    "chat": {
        **_OF_A_MODEL,
        "template": "--chat-template",
        "max_new_tokens": "--max-tokens",
        **{key: f"--set {key}" for key in _SAMPLING},
    },
    "api": {**_OF_A_BASE, "template": "--chat-template"},
    "batch": {**_OF_A_BASE, "template": "--chat-template"},
    "export": {
        **_OF_A_MODEL,
        "export_dir": "--output",
        "export_size": "--shard-size",
        "export_format": "--format",
        "save_method": "--format",
        "quantization_method": "--quantization",
        "quantization_type": "--quantization",
        "outtype": "--quantization",
        "outfile": "--output",
    },
}
"""Our options by the flags of other tools, for each command; ``MODEL`` is an argument."""

COMMANDS = [
    *(Alias("command", f"gym {theirs}", f"`gym {ours}`") for theirs, ours in RENAMED.items()),
    Alias("command", "gym serve MODEL", "`gym api --base MODEL`"),
    Alias("command", "gym run MODEL PROMPT", "`gym chat MODEL --prompt PROMPT`"),
    Alias(
        "command",
        "gym train --model_name_or_path X --template qwen3 --dataset alpaca_en_demo "
        "--finetuning_type lora --output_dir D",
        "a LLaMA-Factory file with these keys; `alpaca_en_demo` lies in its repository: run it where "
        "`data/dataset_info.json` is, or with a set of `gym data catalogue`",
    ),
    Alias(
        "command", "gym train --model X --data my.jsonl", "`gym train` of a file with these keys, or `--set`"
    ),
    Alias(
        "command",
        "gym train run.yaml --lora.r 8 --learning-rate 1e-4",
        "`--set lora.r=8 --set learning_rate=1e-4`",
    ),
    *(
        Alias("command", f"gym {command} --{theirs}", f"`{ours}`")
        for command, flags in FLAGS.items()
        for theirs, ours in flags.items()
    ),
    *(Alias("command", f"gym export --{flag}", what) for flag, what in _NOT_NEEDED.items()),
    *evaluation.COMMANDS,
]


def translate_command(words: Sequence[str], options: Mapping[str, bool], known: bool) -> list[str]:
    """Translate a command line of another tool.

    Args:
        words: The command and everything after it.
        options: The options of the command of that name, and whether each takes a value.
        known: True if we have a command of that name.

    Raises:
        GymError: ``USAGE`` for a command or flag without a counterpart, with the lines to write instead.
    """
    command, rest = words[0], list(words[1:])
    if not known:
        if command not in RENAMED:
            return list(words)
        note(f"gym {command}", f"`gym {RENAMED[command]}`")
        return [RENAMED[command], *_arguments(command, rest)]
    if command == "train":
        return [command, *as_settings(rest, options)]
    if command == "configs" and rest[:1] == ["validate"]:
        return [command, "validate", *as_settings(rest[1:], options)]
    if command == "eval" and "--tasks" in options:
        return [command, *evaluation.translate_eval_flags(rest, options)]
    return [command, *_flags(command, rest, options)]


def _arguments(command: str, rest: list[str]) -> list[str]:
    """Turn the arguments of vLLM's ``serve MODEL`` and Ollama's ``run MODEL PROMPT`` into our options."""
    at = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    words, options = rest[:at], rest[at:]
    if command == "serve" and len(words) == 1 and not words[0].endswith((".yaml", ".yml")):
        note("gym serve MODEL", "`gym api --base MODEL`")
        return ["--base", *words, *options]
    if command == "run" and len(words) == 2:
        note("gym run MODEL PROMPT", "`gym chat MODEL --prompt PROMPT`")
        return [words[0], "--prompt", words[1], *options]
    return rest


def _flags(command: str, rest: list[str], options: Mapping[str, bool]) -> list[str]:
    """Rename the flags of one command; unknown flags are left for the command to refuse."""
    left, flags = split_flags(rest, options)
    ours: list[str] = []
    model: list[str] = []
    for key, values in flags.items():
        dashed = f"--{key.replace('_', '-')}"
        target = FLAGS.get(command, {}).get(key)
        if dashed in options:
            ours += [dashed, *values]
        elif target == "MODEL":
            note(f"gym {command} --{key}", f"`gym {command} MODEL`")
            model = values
        elif target is not None and target.startswith("--set "):
            note(f"gym {command} --{key}", f"`{target}=VALUE`")
            ours += [word for value in values for word in ("--set", f"{target.split()[1]}={value}")]
        elif target is not None:
            note(f"gym {command} --{key}", f"`{target}`")
            ours += [word for value in values for word in (target, value)]
        elif key in _NOT_NEEDED and command in FLAGS:
            note(f"gym {command} --{key}", _NOT_NEEDED[key])
        else:
            ours += [dashed, *values]
    at = 1 if left[:1] in (["serve"],) else 0
    return [*left[:at], *model, *left[at:], *ours]
