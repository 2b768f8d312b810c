"""Translate commands and flags of other tools to those of gym-fed before parsing, with a note, or refuse them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gym_fed.core.aliases import note
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.interop.draft import Alias, Unsupported
from gym_fed.interop.flags import as_settings, split_flags

_EVAL_RENAMED = {"output_path": "--output"}
"""Options of `gym eval` by the flags of other tools."""

_EVAL_NOT_NEEDED = {
    "batch_size": "not needed (the engine sizes its batches itself)",
    "max_batch_size": "not needed (the engine sizes its batches itself)",
    "log_samples": "not needed (every record contains all samples)",
    "use_cache": "not needed (results are always cached)",
    "cache_requests": "not needed (results are always cached)",
    "trust_remote_code": "not needed (code shipped with a model is never run)",
    "confirm_run_unsafe_code": "not needed (code runs in the sandbox)",
}
"""Flags for behaviour that the engine and the records always have."""

EVAL_REFUSED = {
    "gen_kwargs": Unsupported(
        "the task defines its generation settings, so that results are reproducible",
        (
            "gym eval MODEL --tasks my.yaml",
            "generation_kwargs: {max_gen_toks: 64, until: [stop]}  # in my.yaml",
        ),
    ),
    "system_instruction": Unsupported(
        "the task defines the text before its prompts",
        ("gym eval MODEL --tasks my.yaml", 'description: "Answer with one word.\\n"  # in my.yaml'),
    ),
    "include_path": Unsupported(
        "a custom task is a file", ("gym eval MODEL --tasks folder/my.yaml", "gym eval list")
    ),
    "samples": Unsupported(
        "only the first rows of a task can be selected; single rows of a record can be re-run",
        ("gym eval MODEL --tasks T --limit 20", "gym eval replay ID --task T --sample 17"),
    ),
    "predict_only": Unsupported(
        "answers are graded as they are generated; every record contains them",
        ("gym eval MODEL --tasks T", "gym eval show ID --samples 20"),
    ),
    "wandb_args": Unsupported(
        "records are files; nothing is sent anywhere",
        ("gym eval MODEL --tasks T --json > figures.json", "gym leaderboard html board.html"),
    ),
    "seed": Unsupported(
        "examples and samples are drawn with a fixed seed, so that results are reproducible",
        ("gym eval MODEL --tasks T", "gym eval MODEL --tasks T --num-fewshot 5"),
    ),
}
"""Flags without a counterpart."""

_ENGINES = Unsupported(
    "a model folder is evaluated with gym-fed's own engine, a served model over its API",
    ("gym eval FOLDER --tasks T", "gym eval NAME --tasks T --api http://127.0.0.1:8000"),
)
_EVAL_SWITCHES = ("log_samples", "trust_remote_code", "confirm_run_unsafe_code", "predict_only")
_LISTS = ("model_args", "gen_kwargs", "wandb_args", "samples")
_LOCAL = ("hf", "hf-auto", "huggingface")
_SERVED = ("local-completions", "local-chat-completions")
_SILENT = ("parallelize", "trust_remote_code", "batch_size", "max_batch_size", "num_concurrent")
_EVAL_OPTIONS = {"peft": "--adapter", "dtype": "--dtype"}

_EVAL_COMMANDS = [
    Alias(
        "command",
        "gym eval --model hf --model_args pretrained=X,peft=A,dtype=D",
        "`gym eval X --adapter A --dtype D`",
    ),
    Alias(
        "command",
        "gym eval --model local-completions --model_args model=X,base_url=http://host/v1/completions",
        "`gym eval X --api http://host/v1`",
    ),
    Alias("command", "gym eval --model vllm", _ENGINES.why, _ENGINES.instead),
    *(Alias("command", f"gym eval --{theirs}", f"`{ours}`") for theirs, ours in _EVAL_RENAMED.items()),
    *(Alias("command", f"gym eval --{flag}", what) for flag, what in _EVAL_NOT_NEEDED.items()),
    *(Alias("command", f"gym eval --{flag}", what.why, what.instead) for flag, what in EVAL_REFUSED.items()),
]


def _translate_eval_flags(rest: Sequence[str], options: Mapping[str, bool]) -> list[str]:
    """Translate the arguments of `gym eval`.

    Args:
        rest: The arguments as typed.
        options: The options of `gym eval run`; True for those that take a value.

    Raises:
        GymError: ``USAGE`` for a flag without a counterpart, with the lines to write instead.
    """
    left, flags = split_flags(rest, options, _EVAL_SWITCHES, _LISTS)
    ours: list[str] = []
    named: list[str] = []
    if "model" in flags or "model_args" in flags:
        arguments = _model_arguments(flags.pop("model_args", []))
        named, ours = _model((flags.pop("model", None) or ["hf"])[-1], arguments)
        left = _tasks_joined(left)
    for key, values in flags.items():
        dashed = f"--{key.replace('_', '-')}"
        if (refused := EVAL_REFUSED.get(key)) is not None:
            raise refused.error(f"--{key}", code=ErrorCode.USAGE)
        if key in _EVAL_NOT_NEEDED:
            note(f"gym eval --{key}", _EVAL_NOT_NEEDED[key])
        elif key in _EVAL_RENAMED:
            note(f"gym eval --{key}", f"`{_EVAL_RENAMED[key]}`")
            ours += [word for value in values for word in (_EVAL_RENAMED[key], value)]
        else:
            ours += [dashed, *values]
    at = 1 if left[:1] == ["run"] else 0
    return [*left[:at], *named, *left[at:], *ours]


def _tasks_joined(words: Sequence[str]) -> list[str]:
    """Join ``--tasks a b`` to ``--tasks a,b``; with the model as a flag there are no other arguments."""
    tasks: list[str] = []
    for word in words:
        if tasks[-2:-1] == ["--tasks"] and not word.startswith("-"):
            tasks[-1] += f",{word}"
        else:
            tasks.append(word)
    return tasks


def _model(name: str, arguments: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return MODEL and the options for ``--model`` and ``--model_args``."""
    if not arguments and name not in (*_LOCAL, *_SERVED):
        note("gym eval --model", "`gym eval MODEL`")
        return [name], []
    if name not in (*_LOCAL, *_SERVED):
        raise _ENGINES.error(f"--model {name}", code=ErrorCode.USAGE)
    model = arguments.get("pretrained") or arguments.get("model")
    if not model:
        remedy = "gym eval MODEL --tasks T, or --model_args pretrained=MODEL"
        raise GymError(ErrorCode.USAGE, f"--model {name}: no model is given", remedy)
    options: list[str] = []
    for key, value in arguments.items():
        if key == "base_url" and name in _SERVED:
            options += ["--api", re.sub(r"(/chat)?/completions/?$", "", value)]
        elif key in _EVAL_OPTIONS:
            options += [_EVAL_OPTIONS[key], value]
        elif key not in ("pretrained", "model", *_SILENT):
            remedy = "omit it; gym eval run --help lists the model's options"
            raise GymError(ErrorCode.USAGE, f"--model_args {key}: unknown", remedy)
    note("gym eval --model_args", f"`gym eval {' '.join([model, *options])}`")
    return [model], options


def _model_arguments(words: Sequence[str]) -> dict[str, str]:
    """Parse ``pretrained=X,dtype=float32``, in one argument or several."""
    pairs = [part.partition("=") for word in words for part in word.split(",") if part]
    for key, equals, _ in pairs:
        if not equals:
            raise GymError(ErrorCode.USAGE, f"--model_args {key}: no value", "such as pretrained=FOLDER")
    return {key.strip(): value.strip() for key, _, value in pairs}


RENAMED = {"inference": "batch", "serve": "api", "run": "chat"}
"""Commands of gym-fed by those of other tools."""
_OF_A_MODEL = {"model_name_or_path": "MODEL", "model": "MODEL", "adapter_name_or_path": "--adapter"}
_OF_A_BASE = {"model_name_or_path": "--base", "model": "--base", "adapter_name_or_path": "--adapter"}
_NOT_NEEDED = {
    "template": "not needed (the tokenizer has its template)",
    "finetuning_type": "not needed (the adapter's config has it)",
    "trust_remote_code": "not needed (code shipped with a model is never run)",
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
"""Options of gym-fed by the flags of other tools, for each command; ``MODEL`` is an argument."""

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
    *_EVAL_COMMANDS,
]


def translate_command(words: Sequence[str], options: Mapping[str, bool], known: bool) -> list[str]:
    """Translate a command line of another tool.

    Args:
        words: The command and everything after it.
        options: The options of the command with that name; True for those that take a value.
        known: True if gym-fed has a command with that name.

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
        return [command, *_translate_eval_flags(rest, options)]
    return [command, *_flags(command, rest, options)]


def _arguments(command: str, rest: list[str]) -> list[str]:
    """Convert the arguments of vLLM's ``serve MODEL`` and Ollama's ``run MODEL PROMPT`` to options of gym-fed."""
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
    at = 1 if left[:1] == ["serve"] else 0
    return [*left[:at], *model, *left[at:], *ours]
