"""`gym api`: serve a base and its variants over OpenAI's API; `gym api keys` manages API keys and their permissions."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import ssl
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import typer

from gym_fed.cli.api.keys import keys_app
from gym_fed.cli.api.other_servers import NamesOurOptions
from gym_fed.cli.api.settings import serving_config, with_own_variants
from gym_fed.cli.models.needed import YesOption, ensure_models
from gym_fed.cli.options import BaseOption
from gym_fed.core.addresses import host_port
from gym_fed.core.child_process import leave_at_eof
from gym_fed.core.console import AsJson, AsJsonLines, err, out, print_json, print_result, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import (
    HOST,
    PORT,
    AdapterOption,
    App,
    ChatTemplateOption,
    DefaultCommandGroup,
    ProbeSeconds,
    RootPathOption,
    ServedVariants,
    SetOption,
    TrustedProxyOption,
)
from gym_fed.core.library_env import without_collection
from gym_fed.core.progress import spinner
from gym_fed.core.text import counted, plain

if TYPE_CHECKING:
    from gym_fed.serving.setup import Serving


_LOADER = "gym-api-load"
"""Name of the server thread that loads the model and then the chat renderer."""
_SHOWN_MODELS = 5
_MAX_ANSWER_BYTES = 2000
_MAX_CELL = 4096
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet evaluate a cell as a formula; users choose their names."""
_COLUMNS = ("month", "key", "user", "requests", "prompt_tokens", "completion_tokens", "tokens")


class _ServesByDefault(DefaultCommandGroup):
    default_command = "serve"
    runs_without_words = True


app = App(
    cls=_ServesByDefault,
    help="Serve variants over the OpenAI API, and manage keys. `gym api FILE` is short for `gym api serve FILE`.",
)
app.add_typer(keys_app, name="keys")


@app.command(cls=NamesOurOptions)
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(help="Config of gym api or LLaMA-Factory; by default, your variants and their base."),
    ] = None,
    base: BaseOption = None,
    host: Annotated[str | None, HOST] = None,
    port: Annotated[int | None, PORT] = None,
    adapter: AdapterOption = None,
    variants: ServedVariants = None,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", metavar="FILE", help="API key file, written by `gym api keys add`."),
    ] = None,
    root_path: RootPathOption = None,
    trusted_proxy: TrustedProxyOption = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Allow web pages from this origin, such as https://chat.example.org; repeatable.",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="KIND", help="Engine: own or vllm.")
    ] = None,
    set_: SetOption = None,
    chat_template: ChatTemplateOption = None,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds", min=0.0, help="Time limit of running answers after Ctrl-C or SIGTERM."
        ),
    ] = 20.0,
    until_eof: Annotated[
        bool,
        typer.Option("--until-eof", help="Exit when standard input is closed, for use as a child process."),
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
            err.print("note: there are no local variants yet; restart after creating one, to serve it")
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
        raise GymError(ErrorCode.USAGE, f"{config}: this is a model, not a config", by_flag)
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
        out.print(f"request defaults: {settings}")
    if (parser := serving.service.reasoning_parser) != "none":
        origin = "from the chat template" if serving.config.reasoning_parser == "auto" else "configured"
        out.print(f"thoughts are returned as reasoning_content; parser: {parser} ({origin})")
    served = ServedModel(f"{address}/v1", model, key, bool(serving.tokenizer.chat_template))
    out.print(f"\n{openai_snippet(served)}")
    if serving.config.api_keys is None:
        out.print("no API keys: every program on this machine may use every model; Ctrl-C exits")


@app.command()
def health(
    config: Annotated[
        Path | None, typer.Argument(help="The server's config; by default, the defaults of gym api.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of the server.", show_default="the config's"),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Check only that the process responds, not that a model is loaded.")
    ] = False,
    timeout: ProbeSeconds = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check the running server: exit code 0 if it responds and its model is loaded."""
    from gym_fed.cli.api.settings import serving_config

    settings = serving_config(config, [])
    host, port = settings.host, settings.port
    if address is not None:
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal() or not 0 < int(number) < 65536:
            raise GymError(ErrorCode.USAGE, f"--address {address}: not HOST:PORT", "such as 127.0.0.1:8000")
        host, port = host.strip("[]"), int(number)
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    place = host_port(everywhere.get(host, host), port)
    scheme = "http" if settings.tls is None else "https"
    url = f"{scheme}://{place}/{'health' if live else 'ready'}"
    _get(url, None if settings.tls is None else settings.tls.certificate, timeout)
    text = f"the server at {place} answers" + ("" if live else ", and its model is loaded")
    print_result(as_json, {"url": url, "live": True, "ready": None if live else True}, text)


def _get(url: str, certificate: Path | None, timeout: float) -> None:
    """Request a URL; over TLS only the server's own certificate is trusted, whatever host it names.

    Raises:
        GymError: ``UNAVAILABLE`` if there is no answer, or none with status 200.
    """
    context = ssl.create_default_context(cafile=certificate) if certificate else ssl.create_default_context()
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may lack the root that signed it
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    try:
        with opener.open(Request(url), timeout=timeout):
            return
    except HTTPError as error:
        problem = f"{error.code} {plain(error.read(_MAX_ANSWER_BYTES).decode('utf-8', 'replace'), 400)}"
    except (URLError, OSError) as error:
        problem = str(getattr(error, "reason", error))
    raise GymError(ErrorCode.UNAVAILABLE, f"{url}: {problem}", "see the server's log; is it running?")


@app.command()
def usage(
    file: Annotated[Path, typer.Argument(help="The usage_log file set in serving.yaml.", show_default=False)],
    month: Annotated[
        str | None,
        typer.Option(metavar="YYYY-MM", help="Include only this month, in UTC.", show_default="all"),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for a spreadsheet.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show monthly token totals per key and user."""
    from gym_fed.core.console import TextTable
    from gym_fed.serving.http.usage_log import sum_usage

    if month is not None and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise GymError(ErrorCode.USAGE, f"--month {month!r} is not a month", "write it like 2026-11")
    if as_csv and as_json:
        raise GymError(ErrorCode.USAGE, "--csv cannot be combined with --json", "choose one")
    report = sum_usage(file, month)
    rows = [total.to_dict() for total in report.sums]
    if as_json:
        print_json({"sums": rows, "unreadable": report.unreadable})
    elif as_csv:
        writer = csv.writer(out.file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([_cell(row[column]) for column in _COLUMNS] for row in rows)
    else:
        table = TextTable("month", "key", "user", "requests", "prompt tokens", "answer tokens", "all tokens")
        for row in rows:
            shown = [f"{row[column]:,}" for column in _COLUMNS[3:]]
            table.add_row(row["month"], plain(row["key"], 64), plain(row["user"], 64) or "-", *shown)
        print_table(table)
    if report.unreadable:
        err.print(
            f"{counted(report.unreadable, 'line')} of {file} could not be parsed and are not included",
            markup=False,
        )


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    shown = plain(
        value, _MAX_CELL
    )  # a caller chooses its user's name, which must not drive the terminal either
    return f"'{shown}" if shown.startswith(_FORMULA) else shown
