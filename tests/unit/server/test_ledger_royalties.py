"""Royalties: whole credits for the use of a version, back over its rounds to those whom they credited."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from gym_server.cli import main as cli
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.ledger.royalties import Owner, attribute_use, read_usage, record
from gym_server.store.tables import accounts, credits, rounds, versions
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gym_fed.config.hub.credits import MAX_ROYALTIES, RewardsConfig
from gym_fed.config.hub.task import next_digest
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import contributor_id
from gym_fed.trust.ledger.royalties import PaidVersion, attribute, find_version, split, totals

KEYS = sorted((bytes([number]) * 32 for number in range(4)), key=contributor_id)
ANN, BOB, CAT, OWNER = map(contributor_id, KEYS)
BASE = "sha256:base"
ONE = next_digest(BASE, "soup", 1)
TWO = next_digest(ONE, "soup", 3)
THREE = next_digest(TWO, "soup", 4)
CHAIN = [
    PaidVersion(1, ONE, 1, 0.3, {ANN: 700, BOB: 300}),
    PaidVersion(2, TWO, 3, 0.1, {BOB: 1000}),
    PaidVersion(3, THREE, 4, None, {CAT: 1}),
]


@given(st.integers(0, 10**9), st.integers(1, 3), st.sampled_from(["improvement", "equal"]))
def test_every_credit_is_given_away_and_none_is_made(amount: int, height: int, policy: Any) -> None:
    rounds = attribute(CHAIN, height, amount, policy)
    assert sum(share.amount for share in rounds) == amount
    assert all(sum(share.shares.values()) == share.amount for share in rounds)
    assert sum(totals(rounds).values()) == amount


def test_a_version_pays_its_own_rounds_and_none_after_it() -> None:
    assert totals(attribute(CHAIN, 1, 100)) == {ANN: 70, BOB: 30}
    assert totals(attribute(CHAIN, 2, 100)) == {ANN: 53, BOB: 47}  # 75 and 25; 52.5 of 75 go to the first
    assert CAT not in totals(attribute(CHAIN, 2, 10**6))


def test_rounds_weigh_what_they_improved_and_an_unmeasured_one_their_mean() -> None:
    assert [share.amount for share in attribute(CHAIN, 3, 600)] == [300, 100, 200]
    assert [share.amount for share in attribute(CHAIN, 3, 600, "equal")] == [200, 200, 200]


def test_where_nothing_improved_all_rounds_weigh_alike() -> None:
    worse = [PaidVersion(h, f"sha256:{h}", h, -0.1, {ANN: 1}) for h in (1, 2)]
    assert [share.amount for share in attribute(worse, 2, 10)] == [5, 5]


def test_a_round_that_credited_nobody_is_left_out_and_without_any_nobody_is_paid() -> None:
    empty = PaidVersion(1, "sha256:none", 1, 5.0)
    assert [share.height for share in attribute([empty, *CHAIN[1:]], 3, 10)] == [2, 3]
    with pytest.raises(GymError, match="no round up to version 1 credited anybody"):
        attribute([empty], 1, 10)


def test_a_split_gives_the_rest_to_the_largest_remainders() -> None:
    assert split(10, {"a": Fraction(1), "b": Fraction(1), "c": Fraction(1)}) == {"a": 4, "b": 3, "c": 3}
    assert split(1, {"a": Fraction(1), "b": Fraction(2)}) == {"a": 0, "b": 1}


def test_versions_are_found_by_height_and_digest_and_the_base_is_nobodys() -> None:
    assert find_version(CHAIN, "2") == find_version(CHAIN, TWO) == 2
    for name in ("0", "sha256:base"):
        with pytest.raises(GymError, match="is the base itself"):
            find_version(CHAIN, name, "sha256:base")
    with pytest.raises(GymError, match="no version '9'"):
        find_version(CHAIN, "9")


# ---- at a hub ----


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    """A hub with three versions, as their rounds would have left them."""
    init_hub(tmp_path / "hub", HubChoices(str(tiny_base), "royal", "open"))
    with Federation.open(tmp_path / "hub") as fed:
        with fed.database.transaction() as tx:
            for who, key in zip((ANN, BOB, CAT, OWNER), KEYS, strict=True):
                tx.execute(
                    accounts.insert().values(
                        contributor=who, name=who, public_key=key, status="active", enrolled_at=time.time()
                    )
                )
                fed.keys.first(tx, who, key)
            for paid in CHAIN:
                losses = (1.0, 1.0 - paid.improvement) if paid.improvement is not None else (None, None)
                share = {
                    "height": paid.height,
                    "digest": paid.digest,
                    "server_round": paid.server_round,
                    "heldout_before": losses[0],
                    "heldout_after": losses[1],
                }
                parent = CHAIN[paid.height - 2].digest if paid.height > 1 else BASE
                fed.ledger.append(tx, "version", {**share, "soup": "soup", "soup_bytes": 1, "parent": parent})
                row = {"soup_sha256": "soup", "soup_bytes": 1, "num_updates": 1, "committed_at": time.time()}
                tx.execute(versions.insert().values(**share, **row))
                ended = {"state": "committed", "base_height": paid.height - 1, "opened_at": 0.0, "reason": ""}
                ended |= {"server_round": paid.server_round, "closed_at": time.time()}
                tx.execute(rounds.insert().values(**ended))
                for who, amount in paid.credits.items():
                    credit = {"server_round": paid.server_round, "contributor": who, "amount": amount}
                    fed.ledger.append(tx, "credit", credit)
                    tx.execute(credits.insert().values(**credit))
            for who, key in zip((ANN, BOB, CAT, OWNER), KEYS, strict=True):
                fed.ledger.append(tx, "enrolled", {"contributor": who, "name": who, "public_key": key.hex()})
            fed.ledger.sign_head(tx)
        yield fed


def balance(hub: Federation, who: str) -> int:
    with hub.database.reading() as tx:
        return hub.payouts.balance_of(tx, who)["balance"]


def run(hub: Federation, *arguments: str) -> Any:
    done = CliRunner().invoke(cli.app, ["ledger", *arguments, "--dir", str(hub.folder), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_is_recorded_is_credited_once_and_stands_in_a_ledger_that_verifies(hub: Federation) -> None:
    found = attribute_use(hub.base, hub.database, {"2": 1}, 100, "improvement")
    assert found.shares == {ANN: 53, BOB: 47}
    before = [balance(hub, who) for who in (ANN, BOB, CAT)]
    assert [record(hub.state, "june", found), record(hub.state, "june", found)] == [True, False]
    assert [balance(hub, who) for who in (ANN, BOB, CAT)] == [before[0] + 53, before[1] + 47, before[2]]
    assert hub.ledger.verify()["royalties"] == 2
    with pytest.raises(GymError, match="usage 'june' was recorded with 100 credits") as caught:
        record(hub.state, "june", attribute_use(hub.base, hub.database, {"2": 1}, 101, "improvement"))
    assert caught.value.code is ErrorCode.REPLAYED
    assert balance(hub, ANN) == before[0] + 53


def test_the_owner_of_a_variant_gets_its_share_first(hub: Federation) -> None:
    found = attribute_use(hub.base, hub.database, {ONE: 1}, 101, "equal", Owner(OWNER, 0.5))
    assert found.shares == {ANN: 36, BOB: 15, OWNER: 50}
    with pytest.raises(GymError, match="no contributor 'nobody'"):
        attribute_use(hub.base, hub.database, {"1": 1}, 10, "equal", Owner("nobody", 0.5))


def test_a_usage_report_is_split_by_tokens_and_has_an_id_of_its_own(hub: Federation, tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text(
        f'{{"version": 1, "tokens": 60}}\n\n{{"model": "{TWO}", "tokens": 30}}\n{{"version": 1, "tokens": 10}}\n'
    )
    found = run(hub, "attribute", "--usage", str(path), "--amount", "1000", "--record")
    assert found["versions"] == {ONE: 700, TWO: 300}
    assert sum(found["shares"].values()) == found["amount"] == 1000
    assert (found["recorded"], found["usage"]) == (True, read_usage(path)[1])
    assert run(hub, "attribute", "--usage", str(path), "--amount", "1000", "--record")["recorded"] is False


@pytest.mark.parametrize(
    "line", ["{}", '{"version": 1}', '{"version": 1, "tokens": -1}', "[", '{"version": 1, "tokens": 1.5}']
)
def test_a_line_that_is_no_usage_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text('{"version": 1, "tokens": 3}\n' + line + "\n")
    with pytest.raises(GymError, match=r"usage.jsonl, line 2 is not a usage record"):
        read_usage(path)


@pytest.mark.parametrize(
    "options",
    [
        ("--amount", "1"),
        ("--amount", "1", "--version", "1", "--usage", "x"),
        ("--amount", "1", "--version", "1", "--policy", "luck"),
        ("--amount", "1", "--version", "1", "--owner", ANN, "--owner-share", "0.5"),
        ("--amount", "1", "--version", "1", "--record"),
        ("--amount", "1", "--version", "1", "--usage-id", "x"),
    ],
    ids=["nothing", "two things", "policy", "owner", "no id", "id for nothing"],
)
def test_options_that_do_not_go_together_are_refused(hub: Federation, options: tuple[str, ...]) -> None:
    with pytest.raises(GymError) as caught:
        run(hub, "attribute", *options)
    assert caught.value.code is ErrorCode.USAGE


def test_show_head_export_and_verify_agree_on_one_ledger(hub: Federation, tmp_path: Path) -> None:
    entries = run(hub, "show")
    assert [e["sequence"] for e in run(hub, "show", "--kind", "credit", "--limit", "2")] == [2, 3]
    assert [e["sequence"] for e in run(hub, "show", "--contributor", BOB, "--from", "4")] == [5, 9]
    head = run(hub, "head")
    assert head["head"]["size"] == len(entries) == 11
    file = tmp_path / "ledger.jsonl"
    assert run(hub, "export", str(file))["hash"] == head["head"]["hash"] == entries[-1]["hash"]
    done = CliRunner().invoke(cli.app, ["ledger", "verify", "--ledger", str(file), "--json"])
    assert json.loads(done.stdout) == {"valid": True, "server": hub.server, "entries": 11, "heads": 1}
    other = CliRunner().invoke(
        cli.app, ["ledger", "verify", "--ledger", str(file), "--server-id", "s" + "0" * 16]
    )
    assert isinstance(other.exception, GymError)
    assert run(hub, "verify")["entries"] == 11


def test_more_than_can_be_counted_is_not_credited(hub: Federation) -> None:
    found = attribute_use(hub.base, hub.database, {"2": 1}, MAX_ROYALTIES - 5, "equal")
    assert record(hub.state, "nearly all", found)
    with pytest.raises(GymError, match="the maximum is") as caught:
        record(hub.state, "more", attribute_use(hub.base, hub.database, {"2": 1}, 6, "equal"))
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert sum(balance(hub, who) for who in (ANN, BOB)) > 2**51
    with pytest.raises(GymError, match="--amount may be at most 1000000000"):
        run(hub, "attribute", "--amount", str(2**63), "--version", "1")
    with pytest.raises(ValueError, match="pool"):
        RewardsConfig(pool=10**19)


def test_ids_are_whole_in_a_pipe(hub: Federation) -> None:
    for command in ("accounts", "rewards"):
        shown = CliRunner().invoke(cli.app, [command, "--dir", str(hub.folder)], terminal_width=40).stdout
        assert all(who in shown for who in (ANN, BOB, CAT, OWNER)), command


def test_what_a_version_says_of_its_loss_is_the_ledgers(hub: Federation) -> None:
    with hub.database.transaction() as tx:
        tx.execute(versions.update().where(versions.c.height == 2).values(heldout_after=0.0))
    with pytest.raises(GymError, match="versions: 2 is"):
        hub.ledger.verify()


def test_nobody_else_can_read_what_the_hub_keeps(hub: Federation) -> None:
    for name in ("hub.db", "objects", "staging", "keys"):
        assert (hub.folder / name).stat().st_mode & 0o077 == 0, name


def test_royalties_cannot_be_moved_before_their_hold_is_over(
    hub: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earned credits: a report of usage that was a mistake, or a thief's, is noticed within the hold."""

    def balance_at(later: float) -> dict[str, int]:
        monkeypatch.setattr(hub.payouts, "_clock", lambda: time.time() + later)
        with hub.database.reading() as tx:
            return hub.payouts.balance_of(tx, ANN)

    hold = hub.config.rewards.hold_seconds
    assert hold > 100
    with hub.database.transaction() as tx:
        tx.execute(rounds.update().values(closed_at=time.time() - 2 * hold))
    before = balance_at(0)
    assert (before["held"], before["available"]) == (0, before["balance"])
    record(hub.state, "june", attribute_use(hub.base, hub.database, {"2": 1}, 100, "improvement"))
    young, old = balance_at(hold - 60), balance_at(hold + 60)
    assert (young["held"], young["available"]) == (53, before["available"])
    assert (old["held"], old["available"]) == (0, before["available"] + 53)


def test_credits_of_a_round_that_is_still_open_cannot_be_moved(hub: Federation) -> None:
    long_ago = time.time() - 2 * hub.config.rewards.hold_seconds
    with hub.database.transaction() as tx:
        tx.execute(rounds.update().values(closed_at=long_ago))
        tx.execute(rounds.update().where(rounds.c.server_round == 1).values(closed_at=None))
    with hub.database.reading() as tx:
        earned = hub.payouts.balance_of(tx, ANN)
    assert earned["held"] == CHAIN[0].credits[ANN] > 0
    assert earned["available"] == earned["balance"] - earned["held"]
