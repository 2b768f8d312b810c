"""The `gym-server dashboard` command, and the `dashboard-keys` commands for its login keys."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.core.addresses import host_port
from gym_fed.core.console import AsJson, AsJsonLines, out, print_event, print_result, print_table
from gym_fed.core.help import HOST, PORT, App, KeyName, RoleOption, RootPathOption, TrustedProxyOption
from gym_server.cli.options import DEFAULT_FOLDER, Folder

if TYPE_CHECKING:
    from pathlib import Path

    from gym_fed.web.access import WebKeys

keys_app = App(
    help="Add, list and remove the keys that open a hub's dashboard on other machines.", no_args_is_help=True
)


def add_dashboard_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command()(dashboard)
    app.add_typer(keys_app, name="dashboard-keys")


def dashboard(
    folder: Folder = DEFAULT_FOLDER,
    host: Annotated[str | None, HOST] = None,
    port: Annotated[int | None, PORT] = None,
    root_path: RootPathOption = None,
    trusted_proxy: TrustedProxyOption = None,
    public: Annotated[bool, typer.Option("--public", help="Allow viewing without a key.")] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Show a running or stopped hub in the browser, read-only for all roles."""
    from gym_fed.config.hub.sections import DashboardConfig
    from gym_fed.core.logs import log_to_stderr
    from gym_fed.serving.http.proxies import Proxies
    from gym_server.cli.run import LOG_LEVELS
    from gym_server.federation import Federation, read_config
    from gym_server.web.dashboard import Dashboard

    log_to_stderr(LOG_LEVELS, read_config(folder).observe.log_format)
    with Federation.open(folder, read_only=True) as fed:
        config = fed.config.dashboard or DashboardConfig()
        at, _, number = config.listen.rpartition(":")
        here = host_port(at.strip("[]") if host is None else host, int(number) if port is None else port)
        proxies = Proxies.parse(
            config.root_path if root_path is None else root_path, trusted_proxy or config.trusted_proxies
        )
        is_public = public or config.public
        pages = Dashboard(fed, here, public=is_public, is_running=False, proxies=proxies)
        with pages:
            if as_json:
                print_event({"event": "dashboard", "url": pages.url})
            else:
                out.print(f"dashboard of {fed.config.name}, read-only: {pages.url}")
            pages.run()


@keys_app.command()
def add(
    name: KeyName,
    role: RoleOption = "viewer",
    metrics: Annotated[
        bool,
        typer.Option("--metrics", help="Instead of --role: allow only reading all of /metrics."),
    ] = False,
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it once. The hub may be running."""
    keys = _keys(folder)
    key_role = "metrics" if metrics else role
    secret = keys.add(name, key_role)
    note = f"shown only once; {name} uses it to {'read /metrics' if metrics else f'log in as {role}'}"
    print_result(as_json, {"name": name, "role": key_role, "key": secret}, secret, note=note)


@keys_app.command("list")
def list_keys(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """List the keys by name and role, without the keys."""
    from gym_fed.core.console import TextTable

    keys = _keys(folder).all()
    table = TextTable("name", "role", "made", box=None)
    for key in keys:
        table.add_row(key.name, key.role, f"{datetime.date.fromtimestamp(key.created_at)}")
    rows = [{"name": key.name, "role": key.role, "created_at": key.created_at} for key in keys]
    print_result(as_json, rows, lambda: print_table(table) if rows else out.print("there are no keys yet"))


@keys_app.command()
def remove(name: KeyName, folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Remove a key; its sessions end at once. The hub may be running."""
    _keys(folder).remove(name)
    print_result(as_json, {"removed": name}, f"removed {name}")


def _keys(folder: Path) -> WebKeys:
    from gym_fed.web.access import KEYS_NAME, WebKeys
    from gym_server.federation import read_config

    read_config(folder)  # raises if the folder has no hub
    return WebKeys(folder / "keys" / KEYS_NAME)
