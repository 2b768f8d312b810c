"""The commands `gym-client audit`: list draws, answer one, check an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_client.cli.options import HomeFolder, Insecure, PassphraseFile, Server, open_home
from gym_fed.core.console import AsJson, TextTable, print_json, print_result, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import DEVICE, App, ColumnsOption
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_client.agent.policy import Policy
    from gym_client.audits.draws import Draw
    from gym_client.hub.transfers import ObjectCache
    from gym_client.hub.transport import HubClient
    from gym_client.identity.home import Home
    from gym_fed.config.hub.task import TaskSpec
    from gym_fed.trust.ledger.audits import SignedVerdict

audit_app = App(
    help="Prove or check that an update was trained as its task specifies. Only for public or disclosed rows.",
    no_args_is_help=True,
)

Update = Annotated[str, typer.Argument(help="Id of the update, or its first characters.", show_default=False)]
VerdictFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="A new file for the signed verdict.",
        show_default="UPDATE.verdict.json",
    ),
]


@audit_app.command("list")
def list_draws(
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Show the drawn updates, from the hub's verified ledger. Deletes the evidence of updates that were not drawn."""
    from gym_client.audits.draws import read_draws
    from gym_client.hub.known import enrolled_client

    folder = open_home(home, passphrase_file)
    with enrolled_client(folder, server, insecure, may_have_left=True) as client:
        draws = read_draws(folder, client)
    rows = [draw.to_dict() for draw in draws.drawn.values()]
    if as_json:
        print_json(rows)
        return
    table = TextTable("update", "contributor", "round", "steps", "detects one false step", "verdict")
    for draw in draws.drawn.values():
        steps = ", ".join(map(str, draw.steps))
        verdict = draw.verdict or "none yet"
        table.add_row(
            draw.update[:12], draw.contributor, str(draw.server_round), steps, f"{draw.chance:.0%}", verdict
        )
    print_table(table)


@audit_app.command()
def answer(
    update: Update,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A new file.", show_default="UPDATE.gymaudit"),
    ] = None,
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Write the answer to an audit of your update. It contains your rows: send it to the auditor."""
    from gym_client.audits.answer import write_answer
    from gym_client.audits.draws import read_draws
    from gym_client.audits.evidence import Evidence
    from gym_client.hub.known import enrolled_client

    folder = open_home(home, passphrase_file)
    with folder.locked(), enrolled_client(folder, server, insecure, may_have_left=True) as client:
        draw = read_draws(folder, client).find(update)
        evidence = Evidence(folder.audits / draw.update)
        if not evidence.folder.exists():
            raise GymError(
                ErrorCode.NOT_FOUND,
                f"{folder.folder} has no evidence of update {draw.update[:12]}",
                "use the --home that sent the update; evidence is deleted after the deadline for answers",
            )
        path = out or Path(f"{draw.update[:12]}.gymaudit")
        write_answer(path, evidence, draw)
        num_rows = len(evidence.rows())
    report = {"update": draw.update, "file": str(path), "size_bytes": path.stat().st_size, "rows": num_rows}
    print_result(
        as_json, report, f"wrote {path} with your {counted(num_rows, 'row')}; send it to the auditor"
    )


@audit_app.command()
def check(
    update: Update,
    file: Annotated[
        Path, typer.Argument(metavar="ANSWER", help="The contributor's answer.", show_default=False)
    ],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your copy of the public rows.", show_default=False),
    ] = None,
    columns: ColumnsOption = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="MODEL", help="Folder of the base model.", show_default="the fetched one"
        ),
    ] = None,
    out: VerdictFile = None,
    device: Annotated[str, DEVICE] = "cpu",
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Repeat the drawn steps of an update, and sign a verdict for the coordinator."""
    from gym_client.agent.policy import Policy
    from gym_client.audits.answer import AuditAnswer
    from gym_client.audits.check import signed_verdict
    from gym_client.audits.draws import read_draws
    from gym_client.hub.known import enrolled_client
    from gym_client.identity.pins import key_at

    folder = open_home(home, passphrase_file)
    with folder.locked(), enrolled_client(folder, server, insecure) as client:
        draw = read_draws(folder, client).find(update)
        if (draw.terms.rows == "public") != (data is not None):
            raise GymError(
                ErrorCode.USAGE,
                f"the hub audits {draw.terms.rows} rows",
                "pass your copy of them with --data"
                if data is None
                else "they are in the answer; omit --data",
            )
        policy = Policy.load(folder.policy_path)
        opened = AuditAnswer.open(file, draw, policy.max_audit_bytes)
        distances, problem = _repeated(folder, client, policy, opened, draw, base, data, columns, device)
        now = float(client.status().hub_seconds)
        signed = signed_verdict(
            draw, client.pin.server, key_at(folder, client.pin.server), now, distances, problem
        )
    _write(signed, out, as_json)


@audit_app.command()
def unanswered(
    update: Update,
    out: VerdictFile = None,
    server: Server = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Sign a verdict that no answer arrived in time."""
    from gym_client.audits import check as audit_check
    from gym_client.audits.draws import read_draws
    from gym_client.hub.known import enrolled_client
    from gym_client.identity.pins import key_at

    folder = open_home(home, passphrase_file)
    with enrolled_client(folder, server, insecure) as client:
        draw = read_draws(folder, client).find(update)
        now = float(client.status().hub_seconds)
        signed = audit_check.unanswered(draw, client.pin.server, key_at(folder, client.pin.server), now)
    _write(signed, out, as_json)


def _repeated(
    home: Home,
    client: HubClient,
    policy: Any,
    opened: Any,
    draw: Draw,
    base: str | None,
    data: Path | None,
    columns: str | None,
    device: str,
) -> tuple[dict[int, float], str]:
    """Check the task against the policy, fetch its soups, and repeat the steps within the policy's time limit."""
    from gym_client.agent.data import load_data
    from gym_client.agent.global_model import base_source, global_model
    from gym_client.agent.hooks import TimeLimit, current_hooks
    from gym_client.agent.work import parse_task, use_threads
    from gym_client.audits.check import repeat_steps
    from gym_client.base.store import BaseStore
    from gym_client.hub.transfers import ObjectCache

    spec = parse_task(opened.document.task.model_dump_json())
    policy.check(spec)
    use_threads(policy.threads)
    cache = ObjectCache(home.objects)
    fetch_version(client, cache, policy, spec)
    rows = None
    if data is not None:
        rows = load_data(str(data), columns=columns, contaminated_rows="keep").rows
    model = global_model(base_source(base or BaseStore(home).find(spec.base_digest), spec.base_model))
    limit = TimeLimit(policy, current_hooks())
    with limit.bounding_templates(), limit.bounding_steps():
        return repeat_steps(opened, draw, model, cache.path, rows, device)


def fetch_version(client: HubClient, cache: ObjectCache, policy: Policy, spec: TaskSpec) -> None:
    """Download the soups from the base to a task's version; additive ones are downloaded as one sum."""
    from gym_client.hub.transfers import download
    from gym_fed.config.hub.task import bytes_to_join, first_summed

    policy.check_download(bytes_to_join(spec.soups))
    needed = [(soup.sha256, soup.size_bytes) for soup in spec.soups[: first_summed(spec.soups)]]
    if spec.soups and (last := spec.soups[-1]).sum_sha256 is not None and last.sum_bytes is not None:
        needed.append((last.sum_sha256, last.sum_bytes))
    for sha256, size in needed:
        if not cache.has(sha256, size):
            download(client, cache, sha256, size)


def _write(signed: SignedVerdict, out: Path | None, as_json: bool) -> None:
    from gym_fed.core.files import write_atomically

    verdict = signed.verdict
    path = out or Path(f"{verdict.update[:12]}.verdict.json")
    if path.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists", "choose another name with --output")
    document = signed.model_dump(mode="json")
    write_atomically(path, json.dumps(document, indent=1).encode())
    figures = ", ".join(f"step {step}: {value:.1e}" for step, value in verdict.distances.items())
    reason = f" ({verdict.reason})" if verdict.reason else ""
    text = f"{verdict.outcome}{reason}; {figures or 'no step repeated'}; signed verdict in {path}"
    print_result(as_json, {**verdict.model_dump(mode="json"), "file": str(path)}, text)
