"""`gym chat`: chat with a model or its variants in the terminal, or answer one message with ``--prompt``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from gym_fed.cli.chat import inference_file
from gym_fed.cli.completion import models, variants
from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.cli.next_command import after_chat, print_next
from gym_fed.cli.options import MAX_TOKENS, ApiKeyEnvOption, refuse_options, require_api_key
from gym_fed.core.console import AsJsonLines, err, print_json
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home, make_folder
from gym_fed.core.help import DEVICE, AdapterOption, ChatTemplateOption, ServedVariants
from gym_fed.core.progress import spinner

if TYPE_CHECKING:
    from gym_fed.serving.chat.local_writer import LocalWriter
    from gym_fed.serving.chat.session import Writer


_HISTORY_LINES = 1000


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder or name, output_dir of a run, BASE:VARIANT or LLaMA-Factory file; with --api, a name.",
            autocompletion=models,
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Print the answer to this prompt, then exit.")
    ] = None,
    attach: Annotated[
        list[Path] | None,
        typer.Option(
            "--attach", metavar="FILE", help="Image, audio or video file for the first message; repeatable."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of the chat.")] = None,
    adapter: AdapterOption = None,
    variant: Annotated[
        str | None,
        typer.Option("--variant", metavar="NAME", help="Answer with this variant.", autocompletion=variants),
    ] = None,
    variants: ServedVariants = None,
    max_tokens: Annotated[int, MAX_TOKENS] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=0.0,
            help="Sampling temperature; 0 = greedy.",
            show_default="the model's own, or greedy",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set another sampling parameter, such as top_p=0.9; repeatable.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Sampling seed.")] = None,
    chat_template: ChatTemplateOption = None,
    device: Annotated[str | None, DEVICE] = None,
    api: Annotated[
        str | None,
        typer.Option("--api", metavar="URL", help="Chat with the model of this OpenAI-compatible server."),
    ] = None,
    api_key_env: ApiKeyEnvOption = None,
    yes: YesOption = False,
    as_json: AsJsonLines = False,
) -> None:
    """Chat with a model: history, streaming, variants; /help lists the commands, /exit exits."""
    from gym_fed.cli.chat.settings import ChatSettings

    translated: dict[str, Any] = {}
    if api is None and inference_file.is_file(model):
        translated = inference_file.read(str(model))
        model, system = translated["model"], system or translated.get("system")
        chat_template = chat_template or translated.get("chat_template")
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    of_file = {key: value for key, value in translated.get("sampling", {}).items() if not _is_given(key)}
    settings = ChatSettings.of(given | of_file)
    for setting in set_ or []:
        settings = settings.changed(setting)
    if api is not None:
        local_only = {"--variants": variants, "--device": device, "--adapter": adapter}
        local_only["--chat-template"] = chat_template
        refuse_options(local_only, "cannot be combined with --api", "leave one of them out")

        from gym_fed.serving.chat.remote_writer import RemoteWriter

        api_key = None if api_key_env is None else require_api_key(api_key_env)
        writer: Writer = RemoteWriter(api, model, api_key=api_key)
    else:
        refuse_options(
            {"--api-key-env": api_key_env},
            "applies only with --api",
            "pass the server's URL with --api, or leave it out",
        )
        if model is None:
            hint = "pass gym-nano, a model folder, a run, or --api URL"
            raise GymError(ErrorCode.USAGE, "MODEL is missing", hint)
        model, variant = _in_parts(model, variant)
        if chat_template is not None:
            from gym_fed.data.chat_templates.choice import read_chat_template

            read_chat_template(chat_template)  # raises for an invalid template before a model is loaded
        ensure_models([model, *(adapter or ())], yes)
        with spinner(f"loading {model}"):
            local = _local(model, adapter or [], variants, variant, device or "auto", chat_template)
        writer, settings = local, settings.over(local.sampling_defaults)

    from gym_fed.cli.chat.terminal import Terminal
    from gym_fed.serving.chat.session import ChatSession, ThoughtText

    with closing(writer):
        conversation = ChatSession(writer, system=system, variant=variant, sampling=settings.fields())
        for file in attach or ():
            conversation.attach(file)
        terminal = Terminal(conversation, settings, as_json=as_json)
        if prompt is None:
            with _line_editing(default_home()):
                terminal.run()
            if api is None and not as_json:
                print_next(after_chat(str(model), conversation.variant, variants))
        elif as_json:
            with closing(conversation.say(prompt)) as texts:
                parts = list(texts)
            thought = "".join(part for part in parts if isinstance(part, ThoughtText))
            answer = "".join(part for part in parts if not isinstance(part, ThoughtText))
            print_json(terminal.report(prompt, answer, thought))
        else:
            terminal.answer(prompt)


def _is_given(key: str) -> bool:
    """Return True if the command line has this setting, which overrides the file's."""
    source = click.get_current_context().get_parameter_source(key)
    return source is not None and source.name == "COMMANDLINE"


def _in_parts(model: str, variant: str | None) -> tuple[str, str | None]:
    """Return base and variant of ``BASE:VARIANT``; any other name is returned unchanged.

    Raises:
        GymError: ``USAGE`` for two variants.
    """
    from gym_fed.serving.store.naming import in_parts

    parts = in_parts(model)
    if parts is None:
        return model, variant
    if variant is not None:
        raise GymError(
            ErrorCode.USAGE, f"{model} and --variant are different variants", "pass one of the two"
        )
    return parts


def _local(
    model: str,
    adapters: list[str],
    variants: Path | None,
    variant: str | None,
    device: str,
    chat_template: str | None,
) -> LocalWriter:
    from gym_fed.serving.chat.local_writer import open_engine, open_plain
    from gym_fed.serving.store.naming import present_store, variants_folder

    needs_store = variants is not None or variant is not None
    store = variants_folder(variants) if needs_store else present_store()
    try:
        return open_engine(
            model, adapters=adapters, variants=store, device=device, chat_template=chat_template
        )
    except GymError as error:
        if error.code is not ErrorCode.MODEL_INVALID or needs_store:
            raise
        try:
            writer = open_plain(model, adapters=adapters, device=device, chat_template=chat_template)
        except GymError:
            raise error from None  # why the engine cannot serve it
        err.print(f"{error.message}: using transformers' generate() instead", style="dim")
        return writer


@contextmanager
def _line_editing(folder: Path) -> Iterator[None]:
    """Enable line editing and a private history file in ``folder``, if Python has readline and input is a terminal.

    If the folder cannot be written, a note is printed and there is no history.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty() and find_spec("readline")):
        yield
        return
    import readline

    history = folder / "chat_history"
    readline.clear_history()
    readline.set_history_length(_HISTORY_LINES)
    readline.set_auto_history(True)
    # Pasted text of several lines is one message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    saved = _read_history(history)
    try:
        yield
    finally:
        if saved:
            _write_history(history)


def _read_history(history: Path) -> bool:
    """Create and read the history file; return True if it can be used."""
    import readline

    try:
        make_folder(history.parent)
        os.close(os.open(history, os.O_RDWR | os.O_CREAT, 0o600))
        history.chmod(0o600)
        readline.read_history_file(history)
    except OSError as error:
        _note_lost(history, error)
        return False
    return True


def _write_history(history: Path) -> None:
    import readline

    try:
        readline.write_history_file(history)
        history.chmod(0o600)  # readline replaces the file
    except OSError as error:
        _note_lost(history, error)


def _note_lost(history: Path, error: OSError) -> None:
    err.print(f"note: the history of messages is not saved: {history}: {error.strerror}", style="dim")
