"""`gym webui`: this machine's workbench in a browser, and the keys for access from other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.cli.next_command import after_webui, print_next
from gym_fed.core.addresses import host_port
from gym_fed.core.console import AsJson, AsJsonLines, err, out, print_columns, print_event, print_result
from gym_fed.core.help import (
    HOST,
    PORT,
    App,
    DefaultCommandGroup,
    KeyName,
    OpenOption,
    RoleOption,
    RootPathOption,
    TrustedProxyOption,
)
from gym_fed.core.progress import spinner

if TYPE_CHECKING:
    from gym_fed.web.access import WebKeys


class _OpensByDefault(DefaultCommandGroup):
    default_command = "serve"
    runs_without_words = True


app = App(
    cls=_OpensByDefault, help="Train, monitor and try models in a browser; options: gym webui serve --help."
)
keys_app = App(help="Add, list and remove keys for logging in from other machines.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")

RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="FOLDER", help="Folder of runs, searched recursively.")
]
DEFAULT_RUNS = Path("runs")


@app.command()
def serve(
    host: Annotated[str, HOST] = "127.0.0.1",
    port: Annotated[int, PORT] = 7860,
    root_path: RootPathOption = None,
    trusted_proxy: TrustedProxyOption = None,
    runs: RunsOption = DEFAULT_RUNS,
    open_page: OpenOption = None,
    as_json: AsJsonLines = False,
) -> None:
    """Serve the workbench of this folder, as `gym webui` does. Ctrl-C ends it; jobs continue."""
    with spinner("loading the workbench"):
        from gym_fed.serving.http.proxies import Proxies
        from gym_fed.webui.app import open_webui
        from gym_fed.webui.workbench import open_workbench

    proxies = Proxies.parse(root_path or "", trusted_proxy or ())
    workbench = open_workbench(Path.cwd(), runs)
    server = open_webui(workbench, host_port(host, port), workbench.folder.name or "gym", proxies)
    err.print("Ctrl-C ends the workbench; its jobs continue")
    if as_json:
        print_event({"event": "webui", "url": server.url})
    else:
        out.print(server.url)
    if open_page or (open_page is None and out.is_terminal):
        server.open_browser()
    server.run()
    if not as_json:
        print_next(after_webui(runs))
    running = [job.title for job in workbench.jobs.list() if job.status == "running"]
    if running:
        err.print(f"still running: {', '.join(running)}", markup=False)


@keys_app.command()
def add(
    name: KeyName, role: RoleOption = "viewer", runs: RunsOption = DEFAULT_RUNS, as_json: AsJson = False
) -> None:
    """Add a key and print it once; the file stores only its hash."""
    keys = _keys(runs)
    key = keys.add(name, role)
    print_result(
        as_json,
        {"name": name, "role": role, "key": key, "file": str(keys.path)},
        key,
        note=f"{name} can log in with this key as {role}; it will not be shown again",
    )


@keys_app.command("list")
def list_keys(runs: RunsOption = DEFAULT_RUNS, as_json: AsJson = False) -> None:
    """List the keys, without the keys themselves."""
    keys = _keys(runs).all()
    print_result(
        as_json,
        [{"name": key.name, "role": key.role, "created_at": key.created_at} for key in keys],
        lambda: print_columns([("name", "role"), *((key.name, key.role) for key in keys)]),
    )


@keys_app.command()
def remove(name: KeyName, runs: RunsOption = DEFAULT_RUNS, as_json: AsJson = False) -> None:
    """Remove a key; its sessions end."""
    _keys(runs).remove(name)
    print_result(as_json, {"removed": name}, note=f"removed {name}")


def _keys(runs: Path) -> WebKeys:
    from gym_fed.web.access import KEYS_NAME, WebKeys

    return WebKeys(runs / KEYS_NAME)
