"""`gym variant snippets`: how other programs use a variant, with its own names in every line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.cli.next_command import command
from gym_fed.cli.variant.options import NameArgument, StoreOption, open_store
from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.progress import spinner
from gym_fed.serving.openai.snippets import (
    DEFAULT_URL,
    NO_KEY,
    ServedModel,
    langchain_snippet,
    open_webui_snippet,
    openai_snippet,
)

if TYPE_CHECKING:
    from gym_fed.serving.store.records import VariantRecord


def snippets(
    name: NameArgument,
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="URL of the server that has the variant.")
    ] = DEFAULT_URL,
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key", metavar="KEY", help="API key of the server.", show_default="none is needed"
        ),
    ] = NO_KEY,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The base model on this machine.",
            show_default="as the variant calls it",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Print snippets that use a variant: openai's client, LangChain, Open WebUI, Ollama."""
    with spinner(f"reading the chat template of {name}"):
        with open_store(store) as opened:
            record, path = opened.get(name), opened.path(name)
        model = base or record.base_model
        served = ServedModel(url, f"{_served_name(model)}:{name}", api_key, _is_chat(path))
        server = command("gym", "api", "--base", model, *_store_words(store))
        found = {
            "server": f"{server}\n",
            "openai": openai_snippet(served),
            "langchain": langchain_snippet(served),
            "open_webui": open_webui_snippet(served),
            "ollama": _ollama(record, model, base is not None, store, served.is_chat),
        }
    titles = {
        "server": "# the server",
        "openai": "# Python: pip install openai",
        "langchain": "# Python: pip install langchain-openai",
        "open_webui": "# Open WebUI",
        "ollama": "# Ollama: one file of base and variant",
    }
    print_result(
        as_json, found, "\n".join(f"{titles[what]}\n{text}" for what, text in found.items()).rstrip()
    )


def _store_words(store: Path | None) -> tuple[str | Path, ...]:
    return () if store is None else ("--variants", store)


def _served_name(model: str) -> str:
    """Return the name that a server gives a base by default."""
    from gym_fed.base.models import model_name

    return model_name(model)


def _is_chat(delta: Path) -> bool:
    """True if the variant was trained on chats, which is assumed unless its file says otherwise."""
    from gym_fed.delta.file import DeltaFile
    from gym_fed.personalization.rows import FORM_KEY

    with DeltaFile.open(delta) as opened:
        return opened.manifest.extra.get(FORM_KEY) != "plain"


def _ollama(record: VariantRecord, base: str, is_named: bool, store: Path | None, is_chat: bool) -> str:
    """Commands that make the file, and the Modelfile; its template where the base is at hand."""
    from gym_fed.serving.store.naming import is_here

    file = f"{record.name}.gguf"
    words = ("gym", "export", base, "--variant", record.name, *_store_words(store), "-o", file)
    note = ""
    if is_named or is_here(base):
        from transformers import AutoConfig

        from gym_fed.base.models import load_tokenizer, resolve
        from gym_fed.export.formats.gguf import why_unread

        tokenizer = load_tokenizer(base)  # refuses what is not a model
        if why_unread(AutoConfig.from_pretrained(resolve(base), local_files_only=True)):
            words += ("--skip-check",)
            note = "# nothing here can read this file back to check it; pip install llama-cpp-python can\n"
    if is_chat and (is_named or is_here(base)):
        from gym_fed.export.modelfile import modelfile

        text = modelfile(f"./{file}", tokenizer)
    elif is_chat:
        text = f"FROM ./{file}\n# its TEMPLATE is printed with --base MODEL, the base on this machine\n"
    else:
        text = f'FROM ./{file}\nTEMPLATE """{{{{ .Prompt }}}}"""\n'
    if "\nMODELFILE\n" in text:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"the chat template of {base} ends a shell's document",
            "write its Modelfile by hand",
        )
    made = command("ollama", "create", record.name, "-f", "Modelfile")
    return f"{note}{command(*words)}\ncat > Modelfile <<'MODELFILE'\n{text}MODELFILE\n{made}\n"
