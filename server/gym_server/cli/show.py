"""Data that commands show, as plain values (``--json``) and as tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from rich.table import Column
from sqlalchemy import func, select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.console import TextTable, short_ids
from gym_fed.core.logs import MAX_LOG_LINE
from gym_fed.core.text import counted, plain, with_error
from gym_fed.trust.ledger.evaluations import EVALUATED
from gym_server.evaluations.records import last_evaluation, last_evaluation_line
from gym_server.privacy.budget import SPENT, promise
from gym_server.rewards.payouts import Payouts
from gym_server.rewards.reputations import rewards_of
from gym_server.rewards.running_scores import carried_over
from gym_server.rounds.merge_progress import merge_state, merge_text
from gym_server.rounds.queue import SET_ASIDE
from gym_server.rounds.round_store import MERGING, PAID_VERDICTS, RoundStore
from gym_server.rounds.steering import Pause, Steering
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.tables import accounts, contributions, credits, messages, nodes, updates
from gym_server.strategy.backoff import paused


def status_of(
    state: HubState, config: ServerConfig, steering: Steering, payouts: Payouts, fingerprint: str
) -> dict[str, Any]:
    """Return the state of the federation: round, contributors, version, ledger."""
    head, current = state.round_store.head(), state.round_store.current()
    with state.database.reading() as tx:
        connected = select(func.max(nodes.c.connected_until)).where(
            nodes.c.contributor == accounts.c.contributor
        )
        rows = tx.execute(
            select(accounts, connected.scalar_subquery().label("until")).order_by(accounts.c.enrolled_at)
        ).all()
        balances = {row.contributor: payouts.balance_of(tx, row.contributor)["balance"] for row in rows}
        committed = state.round_store.depths.of(tx, head.height)
        merge = merge_state(tx) if current and current.state == MERGING else None
    return {
        "name": config.name,
        "server": state.server,
        "fingerprint": fingerprint,
        "base_model": config.public_base_name,
        "base_digest": state.base.digest,
        "version": head.height,
        "version_digest": head.digest,
        "server_round": current.server_round if current else 0,
        "round_state": current.state if current else "",
        "merge": merge,
        "num_rounds": config.rounds.num_rounds,
        "rounds_mode": config.rounds.mode,
        "committed": committed,
        "paused": paused(state.database),
        "pause": pause.to_dict() if (pause := steering.paused()) else None,
        "privacy": promise(config, state.database) or None,
        "evaluation": last_evaluation(state.database),
        "contributors": [
            {
                "contributor": row.contributor,
                "name": row.name,
                "status": row.status,
                "connected": (row.until or 0) > state.clock.now(),
                "balance": balances[row.contributor],
            }
            for row in rows
        ],
    }


def status_table(status: dict[str, Any]) -> TextTable:
    title = (
        f"{status['name']}: version {status['version']} of {status['base_model']}, "
        f"round {status['server_round']} {status['round_state']} "
        f"({status['committed']} of {status['num_rounds']} committed)"
    )
    if status["merge"]:
        title += f"; {merge_text(status['merge'])}"
    if status["pause"]:
        title += f"; {Pause(**status['pause'])}"
    if status["paused"]:
        until = time.strftime("%H:%M:%S", time.localtime(status["paused"]["until"]))
        count, why = status["paused"]["failures"], status["paused"]["reason"]
        title += (
            f"; {counted(count, 'round')} in a row made no version, the next one begins at {until}: {why}"
        )
    if status["privacy"]:
        spent, budget = status["privacy"]["epsilon_spent"], status["privacy"]["epsilon"]
        over = f", {SPENT}" if status["privacy"]["epsilon_after_next_round"] > budget else ""
        title += f", epsilon {spent:.3g} of {budget:g}{over}"
    if status["evaluation"]:
        title += f"; {last_evaluation_line(status['evaluation'])}"
    table = TextTable("contributor", "name", "status", "connected", "credits", title=title)
    shown = short_ids(row["contributor"] for row in status["contributors"])
    for row in status["contributors"]:
        state = "yes" if row["connected"] else "no"
        table.add_row(shown[row["contributor"]], row["name"], row["status"], state, str(row["balance"]))
    return table


def rounds_of(database: Database, round_store: RoundStore) -> list[dict[str, Any]]:
    """Return every round with its updates."""
    with database.reading() as tx:
        names = {row.contributor: row.name for row in tx.execute(select(accounts))}
        earned = {(row.server_round, row.contributor): row.amount for row in tx.execute(select(credits))}
        rows = tx.execute(select(updates).order_by(updates.c.server_round, updates.c.received_at)).all()
        scores = {row.update_id: (row.score, row.error) for row in tx.execute(select(contributions))}
        merge = merge_state(tx)
    by_round: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        credit = earned.get((row.server_round, row.contributor), 0) if row.verdict in PAID_VERDICTS else 0
        score, error = scores.get(row.update_id, (None, None))
        by_round.setdefault(row.server_round, []).append(
            {
                "update": row.update_id,
                "task_round": json.loads(row.manifest).get("server_round"),
                "contributor": row.contributor,
                "name": names.get(row.contributor, "?"),
                "verdict": row.verdict,
                "reason": row.reason,
                "bytes": row.delta_bytes,
                "norm": row.norm,
                "heldout_change": row.heldout_change,
                "score": score,
                "error": error,
                "credit": credit,
            }
        )
    aside = _set_aside(database, names)
    return [
        {
            **line,
            "updates": by_round.get(line["server_round"], []),
            "set_aside": aside.get(str(line["server_round"]), []),
            "merge": merge if line["state"] == MERGING else None,
        }
        for line in round_store.history()
    ]


def _set_aside(database: Database, names: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Return the unreadable replies, by round."""
    query = (
        select(messages.c.group_id, messages.c.receipt, nodes.c.contributor)
        .join(nodes, nodes.c.node_id == messages.c.node_id)
        .where(messages.c.state == SET_ASIDE)
    )
    by_round: dict[str, list[dict[str, Any]]] = {}
    with database.reading() as tx:
        for row in tx.execute(query):
            reason = json.loads(row.receipt)["reason"]
            name = names.get(row.contributor, "?")
            update = {"contributor": row.contributor, "name": name, "verdict": SET_ASIDE, "reason": reason}
            by_round.setdefault(row.group_id, []).append(update)
    return by_round


def rounds_tables(rounds: list[dict[str, Any]]) -> list[TextTable]:
    return [_round_table(line) for line in rounds]


def describe_round(database: Database, round_store: RoundStore, server_round: int) -> dict[str, Any]:
    """Return one round as data, with a line of text under ``text``."""
    line = next(r for r in rounds_of(database, round_store) if r["server_round"] == server_round)
    return {**line, "text": _round_title(line)}


def ledger_lines(entry: dict[str, Any]) -> list[str]:
    """Format an entry as one line; an evaluation entry has another line per task."""
    return [_ledger_line(entry), *(_evaluated_lines(entry) if entry["kind"] == EVALUATED else ())]


def _evaluated_lines(entry: dict[str, Any]) -> Iterator[str]:
    for suite in entry["body"]["suites"]:
        for name, task in suite["tasks"].items():
            text = (
                f"{suite['suite']}: {name} {task['metric']} {task['before']:.4f} -> {task['after']:.4f}, drop "
                f"{task['drop']:.4f}, at least {task['bound']:.4f} (allowed {suite['max_drop']:g}), "
                f"{task['num_samples']} of {counted(task['total_rows'], 'row')}"
            )
            yield f"      {plain(text, MAX_LOG_LINE)}"


def _ledger_line(entry: dict[str, Any]) -> str:
    body = " ".join(f"{k}={_short(v)}" for k, v in sorted(entry["body"].items()) if k != "recipe")
    return plain(f"{entry['sequence']:>5} {entry['hash'][:12]} {entry['kind']:<9} {body}", MAX_LOG_LINE)


def _round_title(line: dict[str, Any]) -> str:
    text = f"round {line['server_round']} {line['state']}"
    if line["merge"]:
        text += f": {merge_text(line['merge'])}"
    if line["version"] is not None:
        text += f", version {line['version']}, soup {counted(line['soup_bytes'], 'byte')}"
    if line["heldout_before"] is not None:
        text += f", held-out loss {line['heldout_before']:.3f} -> {line['heldout_after']:.3f}"
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(line["verdicts"].items()))
    return (
        text
        + (f", {verdicts}" if verdicts else "")
        + (
            f", {line['working']} of {counted(line['tasks'], 'contributor')} still at work"
            if line["working"]
            else ""
        )
        + (f": {plain(line['reason'])}" if line["reason"] else "")
    )


def _round_table(line: dict[str, Any]) -> TextTable:
    columns = ("name", "verdict", "bytes", "norm", "score", "credit", "reason")
    table = TextTable(*columns, title=_round_title(line))
    for row in line["updates"]:
        norm = "" if row["norm"] is None else f"{row['norm']:.3g}"
        score = "" if row["score"] is None else with_error(row["score"], row["error"])
        table.add_row(
            row["name"], row["verdict"], f"{row['bytes']:,}", norm, score, str(row["credit"]), row["reason"]
        )
    for row in line["set_aside"]:
        table.add_row(row["name"], row["verdict"], "", "", "", "0", row["reason"])
    return table


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)}]"
    return plain(value, 28)


def privacy_lines(facts: dict[str, Any]) -> Iterator[str | TextTable]:
    """Yield the report of ``gym_server.privacy.budget`` as text and tables."""
    central = facts["central"]
    if not central:
        yield "this hub does not promise differential privacy (no privacy section in its config)"
        return
    yield (
        f"epsilon {central['epsilon_spent']:.4g} of {central['epsilon']:g} is spent at delta "
        f"{central['target_delta']:g} in {counted(central['rounds'], 'round')}; after the next one it is "
        f"{central['epsilon_after_next_round']:.4g} "
        f"({central['accountant']} accountant)"
    )
    if central["epsilon_after_next_round"] > central["epsilon"]:
        yield "no further round starts: it would exceed the budget"
    adaptive = ", adaptive" if central["adaptive_clipping"] else ""
    yield (
        f"aggregator {central['aggregator']}, mechanism {central['mechanism']}, "
        f"noise multiplier {central['noise_multiplier']:g}, clipping norm "
        f"{central['clipping_norm']:.4g} ({central['clipping']}{adaptive})"
    )
    yield f"adjacency: {central['adjacency']}"
    yield f"sampling: {central['sampling']}"
    if facts["rounds_without_noise"]:
        yield f"not covered (merged without noise): {counted(facts['rounds_without_noise'], 'committed round')}"
    table = TextTable("contributor", "epsilon", "rounds")
    for row in facts["contributors"]:
        table.add_row(row["contributor"], f"{row['epsilon']:.4g}", str(row["rounds"]))
    yield table


def rewards_shown(config: ServerConfig, database: Database, payouts: Payouts) -> dict[str, Any]:
    """Return the reward rule, and every contributor that has an account or has sent an update."""
    pay = config.rewards
    with database.reading() as tx:
        names = {row.contributor: row.name for row in tx.execute(select(accounts))}
        sent = tx.scalars(select(updates.c.contributor).distinct()).all()
        people = sorted({*names, *sent})
        rewards = {who: rewards_of(tx, who, pay) for who in people}
        balances = {who: payouts.balance_of(tx, who) for who in people}
        left = carried_over(tx)
    quality, participation = pay.weights
    return {
        "pool": pay.pool,
        "score": pay.score,
        "quality_weight": quality,
        "participation_weight": participation,
        "credits_per_nat": pay.credits_per_nat,
        "left": left,
        "contributors": [
            {"contributor": who, "name": names.get(who, ""), **balances[who], **rewards[who]}
            for who in people
        ],
    }


def rewards_table(rewards: dict[str, Any], wide: bool = False) -> TextTable:
    """Return the rewards of ``rewards_shown`` as a table; ids are shortened unless ``wide``."""
    title = (
        f"{counted(rewards['pool'], 'credit')} a round, at most {rewards['credits_per_nat']:g} per nat of "
        "certain gain: "
        f"{rewards['quality_weight']:.0%} by {rewards['score']}, {rewards['participation_weight']:.0%} for merged "
        f"updates; {rewards['left']} left in the pool"
        if rewards["quality_weight"]
        else f"{counted(rewards['pool'], 'credit')} a round, for merged updates; contributions are not measured"
    )
    who = Column("contributor", no_wrap=True)
    ids = [row["contributor"] for row in rewards["contributors"]]
    shown = dict(zip(ids, ids, strict=True)) if wide else short_ids(ids)
    columns = ("name", "credits", "reputation", "last scores", "last verdict")
    table = TextTable(who, *columns, title=title)
    for row in rewards["contributors"]:
        scores = [with_error(r["score"], r["error"]) for r in row["rounds"] if r["score"] is not None][:3]
        last = row["rounds"][0] if row["rounds"] else None
        table.add_row(
            shown[row["contributor"]],
            row["name"] if row["name"] != row["contributor"] else "",
            str(row["balance"]),
            f"{row['reputation']:.3f}",
            ", ".join(scores) or "-",
            "-" if last is None else f"{last['verdict']} {last['reason']}".strip(),
        )
    return table
