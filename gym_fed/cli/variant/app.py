"""`gym variant`: list, verify, undo and clean up variants, and print snippets for programs that use one."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.next_command import command
from gym_fed.cli.variant.add import add, sign
from gym_fed.cli.variant.create import create, rebase
from gym_fed.cli.variant.options import KeyOption, NameArgument, StoreOption, open_store, owners_key
from gym_fed.cli.variant.remove import receipt_app, remove
from gym_fed.cli.variant.wire import hub_app, pull, push
from gym_fed.core import console
from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted
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
            show_default="the name in the variant's record",
        ),
    ] = None,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Print snippets that use a variant: openai's client, LangChain, Open WebUI, Ollama."""
    with spinner(f"reading the chat template of {name}"):
        from gym_fed.base.models import model_name

        with open_store(store) as opened:
            record, path = opened.get(name), opened.path(name)
        model = base or record.base_model
        served = ServedModel(url, f"{model_name(model)}:{name}", api_key, _is_chat(path))
        server = command("gym", "api", "--base", model, *_store_words(store))
        snippets_by_name = {
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
        as_json,
        snippets_by_name,
        "\n".join(f"{titles[what]}\n{text}" for what, text in snippets_by_name.items()).rstrip(),
    )


def _store_words(store: Path | None) -> tuple[str | Path, ...]:
    return () if store is None else ("--variants", store)


def _is_chat(delta: Path) -> bool:
    """Return True if the variant was trained on chats, which is assumed unless its file states otherwise."""
    from gym_fed.delta.file import DeltaFile
    from gym_fed.personalization.rows import FORM_KEY

    with DeltaFile.open(delta) as opened:
        return opened.manifest.extra.get(FORM_KEY) != "plain"


def _ollama(record: VariantRecord, base: str, is_named: bool, store: Path | None, is_chat: bool) -> str:
    """Return the commands that create the file and the Modelfile, with its template if the base is on this machine."""
    from gym_fed.serving.store.naming import is_here

    file = f"{record.name}.gguf"
    words = ("gym", "export", base, "--variant", record.name, *_store_words(store), "-o", file)
    note, base_is_here = "", is_named or is_here(base)
    if base_is_here:
        from gym_fed.base.modeling.config_checks import load_config
        from gym_fed.base.models import load_tokenizer, resolve
        from gym_fed.export.formats.gguf import reader_of

        tokenizer = load_tokenizer(base)  # raises if it is not a model
        if not reader_of(load_config(Path(resolve(base)))):
            words += ("--skip-check",)
            note = "# the file is not checked after writing; that needs: pip install llama-cpp-python\n"
    if is_chat and base_is_here:
        from gym_fed.export.modelfile import modelfile

        text = modelfile(f"./{file}", tokenizer)
    elif is_chat:
        text = f"FROM ./{file}\n# its TEMPLATE is printed with --base MODEL, the base on this machine\n"
    else:
        text = f'FROM ./{file}\nTEMPLATE """{{{{ .Prompt }}}}"""\n'
    if "\nMODELFILE\n" in text:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"the chat template of {base} contains the line MODELFILE, which ends the shell's here-document",
            "write the Modelfile yourself",
        )
    create_command = command("ollama", "create", record.name, "-f", "Modelfile")
    return f"{note}{command(*words)}\ncat > Modelfile <<'MODELFILE'\n{text}MODELFILE\n{create_command}\n"


app = App(
    help="Create, list, check, share and remove personal variants of a base model.", no_args_is_help=True
)
app.command()(create)
app.command()(rebase)
app.command()(add)
app.command()(sign)
app.command()(snippets)
app.command()(remove)
app.command()(push)
app.command()(pull)
app.add_typer(hub_app, name="hub")
app.add_typer(receipt_app, name="receipt")


@app.command("list")
def list_variants(
    user: Annotated[
        str | None, typer.Option("--user", metavar="ID", help="Show only variants of this owner.")
    ] = None,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """List the variants of a store."""
    from gym_fed.core.console import TextTable

    with open_store(store) as opened:
        records = list(opened.list(user))
    table = TextTable(
        "variant", "owner", "revision", "base", "bytes", "signed", "note", box=None, pad_edge=False
    )
    for record in records:
        table.add_row(
            record.name,
            record.owner,
            str(record.revision),
            record.base_model,
            f"{record.size_bytes:,}",
            "yes" if record.is_signed else "no",
            record.note,
        )
    print_result(as_json, [record.to_dict() for record in records], table)


@app.command()
def show(name: NameArgument, store: StoreOption = None, as_json: AsJson = False) -> None:
    """Show a variant's record, and where its file is."""
    with open_store(store) as opened:
        record = opened.get(name)
        fields = {**record.to_dict(), "file": str(opened.path(name))}
    lines = (f"{key:<13}{'-' if value is None else value}" for key, value in fields.items())
    print_result(as_json, fields, *lines)


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name of the variant.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Check every variant of the store.")] = False,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Accept variants without a signature.")
    ] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Check variants byte by byte: hash, format, base, manifest, signature. The first failure sets the exit code."""
    if (name is None) is not all_:
        raise GymError(
            ErrorCode.USAGE, "pass either NAME or --all", "--all checks every variant of the store"
        )
    faults: list[GymError] = []
    checked: list[dict[str, Any]] = []
    with open_store(store, require_signature=not allow_unsigned) as opened:
        for variant in opened.names() if name is None else [name]:
            try:
                opened.verify(variant)
            except GymError as error:
                if name is not None:
                    raise
                faults.append(error)
                checked.append({"name": variant, "ok": False, **error.to_dict()})
            else:
                checked.append({"name": variant, "ok": True})
            if not as_json:
                problem = f"{faults[-1].message}\n  {faults[-1].hint}" if not checked[-1]["ok"] else "ok"
                console.out.print(f"{variant}: {problem}")
    if as_json:
        console.print_json(checked)
    elif faults:
        console.err.print(f"{len(faults)} of {counted(len(checked), 'variant')} failed the check")
    if faults:
        raise typer.Exit(faults[0].exit_code)


@app.command()
def trust(
    user: Annotated[str, typer.Argument(metavar="USER", help="Id of an account or user.")],
    public_key: Annotated[str, typer.Argument(metavar="KEY", help="The public key: 64 hex digits.")],
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Permanently refuse everything that the key signs.")
    ] = False,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Allow a key to sign a user's variants, such as after a key rotation; or refuse it permanently."""
    if not re.fullmatch(r"[0-9a-f]{64}", public_key):
        raise GymError(ErrorCode.USAGE, f"{public_key[:80]!r} is not a public key", "64 hex digits")
    with open_store(store, create=not revoke) as opened:
        change = opened.revoke if revoke else opened.trust
        change(user, bytes.fromhex(public_key))
    verdict = "is refused from now on" if revoke else "may sign"
    print_result(
        as_json,
        {"user": user, "public_key": public_key, "trusted": not revoke},
        f"key {public_key[:16]} {verdict} for {user}",
    )


@app.command()
def gc(
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, help="Number of revisions to keep of each variant, from now on."),
    ] = None,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Remove old revisions (beyond 10 by default), and files left by a killed add or remove."""
    with open_store(store) as opened:
        if keep is not None:
            opened.history.keep(keep)
        files, size = opened.gc()
    text = f"removed {counted(files, 'file')} of {counted(size, 'byte')}"
    print_result(as_json, {"files": files, "bytes": size}, text)


@app.command()
def history(name: NameArgument, store: StoreOption = None, as_json: AsJson = False) -> None:
    """List the stored revisions of a variant, newest first."""
    from gym_fed.core.console import TextTable

    with open_store(store) as opened:
        revisions = [
            {**revision.to_dict(), "codecs": _codecs(opened.history.path(revision))}
            for revision in opened.history.of(name)
        ]
    table = TextTable("revision", "made", "codec", "bytes", "loss", "signed by", "note", box=None)
    for row in revisions:
        table.add_row(
            f"{row['revision']}{' (newest)' if row['is_newest'] else ''}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row["updated_at"])),
            ", ".join(row["codecs"]) or "?",
            f"{row['size_bytes']:,}",
            _losses(row["figures"]),
            row["signed_by"] or "nobody",
            row["note"],
        )
    print_result(as_json, revisions, table)


@app.command()
def undo(
    name: NameArgument,
    to: Annotated[
        int | None,
        typer.Option("--to", min=1, help="Revision to restore.", show_default="the one before the newest"),
    ] = None,
    key: KeyOption = None,
    store: StoreOption = None,
    as_json: AsJson = False,
) -> None:
    """Restore an earlier revision as the newest, signed under the next number; running servers use it at once."""
    from gym_fed.serving.store.signing import undo as make_newest

    with open_store(store) as opened:
        before = opened.get(name)
        signer = owners_key(key, opened.folder, before) if before.is_signed else None
        record, earlier = make_newest(opened, name, signer, to=to)
    if record.base_digest != before.base_digest:
        console.err.print(
            f"note: revision {earlier} requires base {record.base_model} ({record.base_digest[:19]}), not "
            f"{before.base_model} ({before.base_digest[:19]}) as before: serve that base"
        )
    facts = {**record.to_dict(), "restored": earlier}
    print_result(as_json, facts, f"variant {name}: revision {record.revision} restores revision {earlier}")


def _codecs(delta: Path) -> list[str]:
    """Return the codecs of a file's tensors; empty if it cannot be read, which `gym variant verify` reports."""
    from gym_fed.delta.file import DeltaFile

    try:
        with DeltaFile.open(delta) as opened:
            return sorted({record.codec for record in opened.manifest.tensors})
    except GymError:
        return []


def _losses(figures: dict[str, Any]) -> str:
    """Format the losses as ``base -> variant``, as far as they were measured."""
    losses = [figures.get(name) for name in ("loss_base", "loss")]
    numbers = [f"{value:.4f}" if isinstance(value, int | float) else "?" for value in losses]
    return "" if numbers == ["?", "?"] else f"{numbers[0]} -> {numbers[1]}"
