"""`gym api`: serve a base and its variants over OpenAI's API; `gym api keys` manages API keys and their permissions."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.cli.api.health import health
from gym_fed.cli.api.keys import keys_app
from gym_fed.cli.api.other_servers import NamesOurOptions
from gym_fed.cli.api.settings import serving_config, with_own_variants
from gym_fed.cli.api.usage import usage
from gym_fed.cli.completion import models
from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.core.child_process import leave_at_eof
from gym_fed.core.console import AsJsonLines, err, out
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import (
    HOST,
    PORT,
    AdapterOption,
    App,
    ChatTemplateOption,
    DefaultCommandGroup,
    RootPathOption,
    ServedVariants,
    SetOption,
    TrustedProxyOption,
)
from gym_fed.core.library_env import without_collection
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.serving.setup import Serving


_LOADER = "gym-api-load"
"""Name of the server thread that loads the model and then the chat renderer."""
_SHOWN_MODELS = 5


class _ServesByDefault(DefaultCommandGroup):
    default_command = "serve"
    runs_without_words = True


app = App(
    cls=_ServesByDefault,
    help="Serve variants over OpenAI's API, and manage keys: `gym api serving.yaml` is `gym api serve serving.yaml`.",
)
app.add_typer(keys_app, name="keys")
app.command()(health)
app.command()(usage)


@app.command(cls=NamesOurOptions)
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file of gym api or LLaMA-Factory; by default your variants and their base."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="gym-nano, a model folder, or a name on the Hub.",
            autocompletion=models,
            show_default="that of the variants, or gym-nano",
        ),
    ] = None,
    host: Annotated[str | None, HOST] = None,
    port: Annotated[int | None, PORT] = None,
    adapter: AdapterOption = None,
    variants: ServedVariants = None,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", metavar="FILE", help="File of keys, as `gym api keys add` writes it."),
    ] = None,
    root_path: RootPathOption = None,
    trusted_proxy: TrustedProxyOption = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Let web pages of this origin call the API, such as https://chat.example.org; repeatable.",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="KIND", help="Engine: own or vllm.")
    ] = None,
    set_: SetOption = None,
    chat_template: ChatTemplateOption = None,
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", min=0.0, help="Seconds for running answers after Ctrl-C or SIGTERM."),
    ] = 20.0,
    until_eof: Annotated[
        bool,
        typer.Option("--until-eof", help="Exit when standard input ends, for use as a child process."),
    ] = False,
    yes: YesOption = False,
    as_json: AsJsonLines = False,
) -> None:
    """Serve a base and its variants; `gym api serving.yaml` means the same. Ctrl-C lets running answers finish."""
    if until_eof:
        leave_at_eof()
    named = {
        "base": base,
        "adapter": adapter,
        "chat_template": chat_template,
        "variants": variants,
        "host": host,
        "port": port,
        "api_keys": api_keys,
        "root_path": root_path,
        "trusted_proxies": trusted_proxy,
        "cors_origins": cors_origin,
        "engine.kind": engine,
    }
    overrides = [
        f"{key}={json.dumps(value, default=str)}" for key, value in named.items() if value is not None
    ]
    if config is not None:
        _require_config(config)
    with spinner("reading the settings"):
        given = serving_config(config, [*(set_ or []), *overrides])
        settings = with_own_variants(given)
        if settings.chat_template is not None:
            from gym_fed.data.chat_templates.choice import read_chat_template

            read_chat_template(settings.chat_template)  # raises before a model is loaded
    ensure_models([settings.base, *settings.adapter], yes)

    from gym_fed.config.serving import LOOPBACK
    from gym_fed.core.logs import log_to_stderr

    log_to_stderr(dict.fromkeys(("gym_fed", "uvicorn", "asyncio"), logging.WARNING), settings.log_format)
    loading = ExitStack()

    def on_listening(address: str) -> None:
        if settings.host not in LOOPBACK and settings.tls is None:
            err.print(
                "note: this is plain HTTP: outside a trusted network, set tls in serving.yaml, or use a reverse proxy "
                "with TLS"
            )
        err.print(f"listening at {address}; loading {settings.base} ...")
        loading.enter_context(spinner(f"loading {settings.base}"))

    def on_ready(address: str, serving: Serving) -> None:
        loading.close()
        err.print("ready")
        if serving.store is None and "variants" not in given.model_fields_set:
            err.print("note: no variants have been created here yet; restart after creating one, to serve it")
        if as_json:
            sys.stdout.write(json.dumps(_description(address, serving)) + "\n")
            sys.stdout.flush()
        else:
            _introduce(address, serving)

    def on_draining(active: int) -> None:
        # Not through the console, since the signal may have arrived while it was writing.
        left = f"; up to {drain_seconds:g} s for {counted(active, 'active answer')} to finish; Ctrl-C again cancels"
        text = f"\nleaving{left if active else ''}\n"
        with suppress(OSError):  # the reader may have exited
            os.write(sys.stderr.fileno(), text.encode())

    with loading:
        loading.enter_context(without_collection(freeze=True))
        with spinner("starting the server"):
            from gym_fed.serving.http.server import run_server
        finished = run_server(
            settings,
            drain_seconds=drain_seconds,
            on_listening=on_listening,
            on_ready=on_ready,
            on_draining=on_draining,
        )
    if not finished:
        raise GymError(ErrorCode.INTERRUPTED, "active answers were cancelled")
    _leave_if_loading()


def _leave_if_loading() -> None:
    """End the process immediately if its model is still being loaded.

    At exit Python stops other threads, and a thread inside PyTorch code would then abort the process.
    """
    if any(thread.name == _LOADER for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _require_config(config: Path) -> None:
    """Refuse a model given instead of a config, and name the option for models.

    Raises:
        GymError: ``USAGE`` for a model; ``FILE_NOT_FOUND`` for a possible model name.
    """
    by_flag = f"pass a model with a flag: gym api --base {config}"
    if str(config) == "gym-nano" or (config / "config.json").is_file():
        raise GymError(ErrorCode.USAGE, f"{config}: a model is not a config", by_flag)
    if not config.exists() and config.suffix not in (".yaml", ".yml"):
        hint = f"pass the path of a YAML file; {by_flag}"
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no config file at {config}", hint)


def _description(address: str, serving: Serving) -> dict[str, Any]:
    return {
        "url": f"{address}/v1",
        "model": serving.served_name,
        "base_digest": serving.base.digest,
        "engine": serving.config.engine.kind,
        "forward": serving.description.forward,
        "base_format": serving.description.base_format,
        "prefix_cache": serving.description.prefix_cache,
        "sampling": serving.service.sampling_defaults,
        "reasoning_parser": serving.service.reasoning_parser,
        "variants": None if serving.store is None else serving.store.count(),
        "api_keys": serving.config.api_keys is not None,
    }


def _introduce(address: str, serving: Serving) -> None:
    """Print the address, the models, and how to call them."""
    from itertools import islice

    from gym_fed.serving.openai.catalogue import LOCAL
    from gym_fed.serving.openai.snippets import NO_KEY, YOUR_KEY, ServedModel, openai_snippet

    names = [model.name for model in islice(serving.service.catalogue.list(LOCAL), _SHOWN_MODELS + 1)]
    more = 0 if serving.store is None else serving.store.count() + 1 - _SHOWN_MODELS
    shown = ", ".join(names[:_SHOWN_MODELS]) + (f" and {more} more" if more > 0 else "")
    model = names[-1] if len(names) <= _SHOWN_MODELS else names[1]
    key = YOUR_KEY if serving.config.api_keys is not None else NO_KEY
    out.print(f"serving {shown}\nat {address}/v1")
    if serving.description.note:
        out.print(serving.description.note, markup=False, highlight=False)
    if sampling := serving.service.sampling_defaults:
        settings = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        out.print(f"defaults of requests: {settings}")
    if (parser := serving.service.reasoning_parser) != "none":
        origin = "of the chat template" if serving.config.reasoning_parser == "auto" else "configured"
        out.print(f"thoughts are returned as reasoning_content; parser: {parser} ({origin})")
    served = ServedModel(f"{address}/v1", model, key, bool(serving.tokenizer.chat_template))
    out.print(f"\n{openai_snippet(served)}")
    if serving.config.api_keys is None:
        out.print("no API keys: every program on this machine may use every model; Ctrl-C exits")
