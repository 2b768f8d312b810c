"""What a contributor keeps of a hub's ledger: heads, receipts and a copy, and how a hub that lies is found out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gym_client.agent.account import Account
from gym_client.agent.residuals import Residuals
from gym_client.cli import main as cli
from gym_client.hub.heads import Heads
from gym_client.hub.known import address_of
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.ledger.receipts import Receipts, check_receipt
from gym_client.ledger.rewards import Tally, verify_copy, verify_online
from gym_client.web.contribute import _receipt
from gym_server.ledger.chain import Ledger
from gym_server.store.database import Database
from typer.testing import CliRunner

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.entries import GENESIS_HASH
from gym_fed.trust.ledger.export import first_line, lines
from gym_fed.trust.ledger.heads import EntryProof, SignedHead, check_fork, contradiction
from gym_fed.trust.ledger.merkle import Tree
from gym_fed.trust.ledger.restored import FORMAT as RESTORED_FORMAT
from gym_fed.trust.ledger.restored import Restored, SignedRestored
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.agent_scene import Recorder
from tests.support.tiny_hub import TinyHub

KEY = SigningKey.generate()


class RealLedger:
    """A hub's own ledger on disk, which can be put back to what it was."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.reopen()

    def reopen(self) -> None:
        self.database = Database.open("sqlite:///hub.db", self.folder)
        self.ledger = Ledger(self.database, KEY)

    def append(self, text: str) -> SignedHead:
        with self.database.transaction() as tx:
            self.ledger.append(tx, "note", {"text": text})
            head = self.ledger.sign_head(tx)
        assert head is not None
        return head

    def saved(self) -> Path:
        """A backup of the hub's folder."""
        with self.database.transaction() as tx:
            tx.exec_driver_sql("SELECT 1")
        self.database.close()
        copy = self.folder.with_name("backup")
        shutil.copytree(self.folder, copy)
        self.reopen()
        return copy

    def restore(self, copy: Path) -> None:
        self.database.close()
        shutil.rmtree(self.folder)
        shutil.copytree(copy, self.folder)
        self.reopen()


@pytest.fixture
def real(tmp_path: Path) -> RealLedger:
    return RealLedger(tmp_path / "hub")


@pytest.fixture
def heads(tmp_path: Path) -> Heads:
    return Heads(Home.open(tmp_path / "home"), KEY.public_key)


def forked(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The message of the fork that a call raises."""
    with pytest.raises(GymError) as caught:
        function(*arguments, **options)
    assert caught.value.code is ErrorCode.LEDGER_FORKED, caught.value
    return caught.value.message


def test_heads_of_one_ledger_are_kept_in_any_order(real: RealLedger, heads: Heads) -> None:
    seen = [real.append(f"entry {number}") for number in range(5)]
    for number in (1, 4, 0, 4, 2):
        heads.see(seen[number], real.ledger.proof)
    assert heads.kept() == {head.size: head for head in (seen[1], seen[4], seen[0], seen[2])}
    assert heads.newest() == seen[4]


def test_an_accepted_restore_whose_reason_has_a_line_separator_is_read_again(
    real: RealLedger, heads: Heads
) -> None:
    head = real.append("first")
    heads.see(head, real.ledger.proof)
    at = head.head.at + 1
    restored = Restored(RESTORED_FORMAT, heads.server, 0, GENESIS_HASH, at, "a disk\u2028failed", None)
    signed = SignedRestored.sign(KEY, restored)
    heads.accept(signed)
    assert heads.accepted() == [signed]
    assert heads.kept() == {}


def test_a_backup_that_went_on_is_a_fork_with_a_proof(real: RealLedger, heads: Heads, tmp_path: Path) -> None:
    heads.see(real.append("first"), real.ledger.proof)
    backup = real.saved()
    heads.see(real.append("what the contributor saw"), real.ledger.proof)
    real.restore(backup)
    same_size = real.append("what took its place")
    message = forked(heads.see, same_size, real.ledger.proof, is_newest=True)
    assert "two different heads of size 2" in message
    document = json.loads((tmp_path / "home" / "proofs" / f"{heads.server}-2-2.json").read_text())
    assert check_fork(document, KEY.public_key) == "two different heads of size 2"
    later = real.append("and later")
    assert "entry 2 differs between" in forked(heads.see, later, real.ledger.proof, is_newest=True)
    document = json.loads((tmp_path / "home" / "proofs" / f"{heads.server}-2-3.json").read_text())
    assert "entry 2 differs between the head of size 3" in check_fork(document, KEY.public_key)
    assert later.size not in heads.kept()


def test_a_ledger_that_became_shorter_is_refused(real: RealLedger, heads: Heads) -> None:
    first = real.append("first")
    backup = real.saved()
    heads.see(real.append("second"), real.ledger.proof)
    real.restore(backup)
    with pytest.raises(GymError, match="cannot show entry 2, which it signed") as caught:
        heads.see(first, real.ledger.proof, is_newest=True)
    assert caught.value.code is ErrorCode.STATE_CORRUPT, "nothing that was signed contradicts anything yet"
    heads.require_one_ledger()


def test_a_kept_head_that_was_changed_on_disk_accuses_nobody(real: RealLedger, heads: Heads) -> None:
    for name in ("first", "second"):
        heads.see(real.append(name), real.ledger.proof)
    text = heads.path.read_text()
    digit = text.rindex('"root":"') + 8
    heads.path.write_text(text[:digit] + ("0" if text[digit] != "0" else "1") + text[digit + 1 :])
    with pytest.raises(GymError, match="changed after the head was checked") as caught:
        heads.see(real.append("third"), real.ledger.proof, is_newest=True)
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    heads.require_one_ledger()


@pytest.mark.parametrize("later", [True, False], ids=["a head of its size follows", "none of its size"])
def test_a_head_over_other_entries_with_the_same_last_one_is_a_lie(
    real: RealLedger, heads: Heads, tmp_path: Path, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hash is right, and an entry that never was can be proved under its root."""
    for name in ("one", "two"):
        real.append(name)
    good = real.append("three")
    path = tmp_path / "ledger.jsonl"
    entries, signed = list(real.ledger.entries()), list(real.ledger.heads())
    tree = Tree([entries[0].hash, "ab" * 32, good.head.hash])
    heads.see(SignedHead.sign(KEY, replace(good.head, root=tree.root(3))), real.ledger.proof)
    if not later:
        # The hub hides its head of size 3, and has the key to leave it out of the count in the next entry, too.
        monkeypatch.setattr("gym_server.ledger.chain.signed_heads", lambda tx: 2)
        real.append("four")
        entries, signed = list(real.ledger.entries()), list(real.ledger.heads())
        signed = [head for head in signed if head.size != 3]
    text = [first_line(KEY.public_key), *lines(entries, signed)]
    path.write_text("".join(line + "\n" for line in text))
    wanted = (
        "two different heads of size 3" if later else "signed a head of size 3 that does not match its ledger"
    )
    with pytest.raises(GymError, match=wanted):
        verify_copy(heads._home, path, KEY.public_key, Tally("c" + "0" * 32))


def test_a_head_that_was_overtaken_is_no_fork(real: RealLedger, heads: Heads) -> None:
    slow, fast = real.append("first"), real.append("second")
    heads.see(fast, real.ledger.proof, is_newest=True)
    heads.see(slow, real.ledger.proof, is_newest=True)
    assert set(heads.kept()) == {1, 2}


@pytest.mark.parametrize("field", ["signature", "hash", "size", "server"])
def test_a_head_that_the_hub_did_not_sign_is_not_kept(real: RealLedger, heads: Heads, field: str) -> None:
    altered = real.append("first").to_dict()
    if field == "signature":
        altered["signature"] = "0" * 128
    else:
        altered["head"][field] = {"hash": "0" * 64, "size": 2, "server": "s" + "0" * 16}[field]
    with pytest.raises(GymError) as caught:
        heads.see(SignedHead.from_dict(altered), real.ledger.proof)
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID
    assert heads.kept() == {}


def test_a_document_that_proves_nothing_is_refused(real: RealLedger) -> None:
    one, two = real.append("first").to_dict(), real.append("second").to_dict()
    document = {
        "format": "gym-fork-1",
        "public_key": KEY.public_key.hex(),
        "heads": [one, two],
        "proof": None,
    }
    with pytest.raises(GymError, match="do not contradict each other"):
        check_fork(document, KEY.public_key)


# ---- with a hub on the line ----


class Scene:
    """A home that is enrolled at a hub, and the update that it sent."""

    def __init__(self, folder: Path) -> None:
        self.hub = TinyHub(folder / "hub", insecure=True).start()
        self.home = Home.open(folder / "home")
        address = Address.parse(self.hub.address)
        self.client = HubClient(self.home, address, establish(self.home, address, None, lambda _: True, True))
        self.client.status()
        self.me = self.client.enrol("ann")
        self.update = "a" * 64
        verdict = {"contributor": self.me, "server_round": 1, "update": self.update}
        self.hub.record("verdict", {**verdict, "verdict": "admitted"})
        self.hub.record("verdict", {**verdict, "verdict": "merged"})
        self.hub.record("credit", {"contributor": self.me, "server_round": 1, "amount": 3})
        self.hub.record("credit", {"contributor": "c" + "0" * 32, "server_round": 1, "amount": 9})
        shown = {
            "update": self.update,
            "server_round": 1,
            "verdict": "merged",
            "reason": "",
            "bytes": 9,
            "credit": 3,
        }
        self.hub.verdicts = [{**shown, "entries": [1, 2, 3]}]

    def run(self, *arguments: str) -> Any:
        options = ["--server", self.hub.address, "--home", str(self.home.folder)]
        return CliRunner().invoke(cli.app, [*arguments, *options])

    def export(self, path: Path) -> Path:
        text = [first_line(self.hub.key.public_key), *lines(self.hub.entries, self.hub.heads)]
        path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
        return path


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    found = Scene(tmp_path)
    yield found
    found.client.close()
    found.hub.stop()


def test_proofs_of_verdict_and_credit_are_kept_and_need_no_hub(scene: Scene) -> None:
    assert Receipts(scene.home, scene.client).fetch(scene.hub.verdicts) == 3
    assert Receipts(scene.home, scene.client).fetch(scene.hub.verdicts) == 0
    kept = scene.home.receipts()
    proofs = [check_receipt(receipt, scene.hub.key.public_key) for receipt in kept]
    assert [proof.entry.kind for proof in proofs if proof] == ["verdict", "verdict", "credit"]
    kept[2]["proof"]["entry"]["body"]["amount"] = 300
    with pytest.raises(GymError, match=r"entry 3 \(credit\) was altered"):
        check_receipt(kept[2], scene.hub.key.public_key)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"score": 0.0123, "error": 0.002}, ", contribution +0.0123 +- 0.0020 nats"),
        ({"score": -0.5, "error": None}, ", contribution -0.5000 nats"),
        ({"score": None, "error": None}, ""),
    ],
)
def test_a_verdict_says_what_the_update_was_worth_and_its_receipt_proves_it(
    scene: Scene, measured: dict[str, Any], said: str
) -> None:
    body = {"contributor": scene.me, "server_round": 1, "update": scene.update, "verdict": "merged"}
    scene.hub.record("verdict", {**body, **measured})
    scene.hub.verdicts[0]["entries"] = [5]
    row = {"server_round": 1, "update": scene.update, "verdict": "merged", "credit": 0, **measured}
    scene.hub.rewards_json = json.dumps({"rounds": [row]})
    display = Recorder()
    Residuals(scene.home, scene.client.pin.server).stage(Path("none"), scene.update)
    Account(scene.home, scene.client, display).take(scene.client.call("Account", pb.AccountRequest()))
    assert display.texts("verdict") == [f"verdict: merged update {scene.update[:12]}{said}"]
    (receipt,) = scene.home.receipts()
    proved = check_receipt(receipt, scene.hub.key.public_key).entry.body
    assert {key: proved[key] for key in measured} == measured
    shown = _receipt(receipt)
    assert {key: shown[key] for key in ("score", "error") if key in shown} == {
        key: value for key, value in measured.items() if value is not None
    }


def test_a_receipt_of_an_upload_has_its_name_and_time() -> None:
    statement = {"committed_at": 1796042081, "contributor": "c1", "server": "s1", "sha256": "2f"}
    commitment = {"signature": "84", "statement": statement}
    shown = _receipt({"server": "s1", "commitment": commitment})
    assert shown == {"server": "s1", "kind": "upload", "at": 1796042081}


def test_everything_is_verified_and_counted_and_the_next_time_only_the_rest_is_fetched(scene: Scene) -> None:
    Receipts(scene.home, scene.client).fetch(scene.hub.verdicts)
    fetched: list[int] = []
    found = verify_online(scene.home, scene.client, lambda done, total: fetched.append(done))
    assert found.to_dict() == {
        "server": scene.hub.server,
        "entries": 4,
        "heads": 4,
        "heads_seen": 1,
        "own_entries": 3,
        "receipts": 3,
        "rounds_credited": 1,
        "balance": 3,
    }
    assert fetched == [1, 2, 3, 4]
    scene.hub.record("left", {"contributor": scene.me})
    assert verify_online(scene.home, scene.client, lambda done, total: fetched.append(done)).entries == 5
    assert fetched[4:] == [5]


CONTRADICTIONS: dict[str, Callable[[Scene], None]] = {
    "a balance of 3, but its ledger adds up to 8": lambda scene: extra(
        scene, {"server_round": 2, "amount": 5}
    ),
    "the hub reports rejected, but its ledger says merged": lambda scene: reported(scene, verdict="rejected"),
    "the hub reports 4 credits, but its ledger says 3": lambda scene: reported(scene, credit=4),
}


def extra(scene: Scene, body: dict[str, Any]) -> None:
    scene.hub.record("credit", {"contributor": scene.me, **body})


def reported(scene: Scene, **changes: Any) -> None:
    scene.hub.verdicts[0] |= changes


@pytest.mark.parametrize("contradiction", sorted(CONTRADICTIONS))
def test_a_hub_that_contradicts_its_ledger_gets_the_contradiction(scene: Scene, contradiction: str) -> None:
    CONTRADICTIONS[contradiction](scene)
    with pytest.raises(GymError, match=contradiction) as caught:
        verify_online(scene.home, scene.client)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_hub_that_keeps_entries_back_is_found(scene: Scene) -> None:
    verify_online(scene.home, scene.client)
    (scene.home.servers / scene.hub.server / "ledger.jsonl").unlink()
    scene.hub.Ledger = lambda request, context: iter(())  # type: ignore[method-assign]
    scene.hub.stop()
    scene.hub.start()
    with pytest.raises(GymError, match="the hub signed 4 entries but sends 0"):
        verify_online(scene.home, scene.client)


def test_an_export_is_verified_without_the_hub_and_a_receipt_it_lacks_is_missed(
    scene: Scene, tmp_path: Path
) -> None:
    Receipts(scene.home, scene.client).fetch(scene.hub.verdicts)
    path = scene.export(tmp_path / "ledger.jsonl")
    scene.hub.stop()
    done = scene.run("rewards", "--verify", "--ledger", str(path), "--json")
    assert json.loads(done.stdout)["verified"]["receipts"] == 3
    short = path.read_text().splitlines(keepends=True)[:5]
    path.write_text("".join(short))
    with pytest.raises(GymError, match="ends at entry 2, but a stored receipt is for entry 3"):
        verify_copy(scene.home, path, scene.hub.key.public_key, Tally(scene.me))
    scene.hub.start()


def test_rewards_show_credits_and_receipts(scene: Scene) -> None:
    done = scene.run("rewards", "--verify", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["balance"], found["verified"]["balance"], found["num_receipts"]) == (3, 3, 3)
    assert found["rounds"][0]["receipts"] == ["verdict", "verdict", "credit"]
    assert "3 credits" in scene.run("rewards").stdout
    known = CliRunner().invoke(cli.app, ["rewards", "--home", str(scene.home.folder)])
    assert "3 credits" in known.stdout, "the one hub that the home knows need not be named"


def test_a_hub_has_to_be_named_where_there_are_two_or_none(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="has never joined a hub"):
        address_of(Home.open(tmp_path / "another home"), None)
    other = Address.parse("127.0.0.1:1")
    scene.client.pin.but(address=str(other)).save(scene.home, other)
    with pytest.raises(GymError, match=f"this home has accounts at .*{scene.hub.address}"):
        address_of(scene.home, None)


def test_kept_heads_are_parsed_once_and_a_torn_line_is_passed_over(
    real: RealLedger, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        heads.see(real.append(name), real.ledger.proof)
    with heads.path.open("a") as file:
        file.write('{"head":{"at":17')
    assert set(heads.kept()) == {1, 2}
    heads.see(real.append("three"), real.ledger.proof)
    assert heads.path.read_text().count("\n") == 3
    monkeypatch.delattr(SignedHead, "from_json")
    assert set(Heads(heads._home, KEY.public_key).kept()) == {1, 2, 3}


def test_two_contributors_compare_heads_and_prove_two_ledgers(scene: Scene, tmp_path: Path) -> None:
    scene.client.status()
    mine = tmp_path / "mine.json"
    mine.write_text(scene.run("ledger", "head", "--json").stdout)
    assert json.loads(scene.run("ledger", "compare", str(mine), "--json").stdout)["same"]
    entries, heads = list(scene.hub.entries), list(scene.hub.heads)
    scene.hub.record("note", {"text": "shown to me"})
    scene.client.status()
    scene.hub.entries, scene.hub.heads = entries, heads
    theirs = tmp_path / "theirs.json"
    scene.hub.record("note", {"text": "shown to others"})
    theirs.write_text(json.dumps(scene.hub.heads[-1].to_dict()))
    shown = scene.run("ledger", "compare", str(theirs))
    assert isinstance(shown.exception, GymError)
    assert shown.exception.code is ErrorCode.LEDGER_FORKED
    (proof,) = scene.home.proofs.iterdir()
    again = scene.run("ledger", "compare", str(proof))
    assert isinstance(again.exception, GymError)
    assert "two different heads of size 5" in again.exception.message
    assert str(proof) in forked(scene.client.status), "the proof stays, whatever the hub shows now"
    copy = tmp_path / "proof of somebody else.json"
    proof.rename(copy)
    assert isinstance(scene.run("ledger", "compare", str(copy)).exception, GymError)
    assert proof.exists(), "what somebody else proves is kept as well"
    scene.hub.stop()  # so that whatever is sent fails otherwise
    for command in (["status"], ["rewards"], ["leave"], ["transfer", "--to", scene.me, "--amount", "1"]):
        shown = scene.run(*command)
        assert isinstance(shown.exception, GymError)
        assert shown.exception.code is ErrorCode.LEDGER_FORKED, command
    scene.hub.start()
    proof.unlink()
    scene.hub.record("note", {"text": "shown to all"})
    assert "entry 5 differs between" in forked(scene.client.status)


def test_a_hub_that_shows_no_head_any_more_is_refused(scene: Scene) -> None:
    scene.client.status()
    scene.hub.heads = []
    with pytest.raises(GymError, match="cannot show entry 4, which it signed"):
        scene.client.status()


def test_a_signature_has_one_spelling(real: RealLedger) -> None:
    head = real.append("first").to_dict()
    for text in (
        head["signature"].upper(),
        head["signature"][:2] + " " + head["signature"][2:],
        head["signature"][:-2],
    ):
        with pytest.raises(GymError, match="is not a signed head"):
            SignedHead.from_dict({**head, "signature": text})


def test_a_proof_of_something_else_is_no_proof(scene: Scene) -> None:
    proof = scene.hub.record("note", {"text": "one"})
    other = scene.hub.record("note", {"text": "two"})
    with pytest.raises(GymError, match=r"entry 5 \(note\) is not under the head of size 6"):
        EntryProof(proof.entry, other.head).verify(scene.hub.key.public_key)


@pytest.mark.parametrize("later", [False, True], ids=["older head seen first", "newer head seen first"])
def test_a_head_whose_time_goes_back_is_a_fork(real: RealLedger, heads: Heads, later: bool) -> None:
    """Everything fits but the times, which show what the hub knew when: a hub that signs so forges one of them."""
    signed = [real.append("first"), real.append("second")]
    signed[1] = SignedHead.sign(KEY, replace(signed[1].head, at=signed[0].head.at - 1))
    assert contradiction(*signed) == contradiction(*reversed(signed))
    first, second = reversed(signed) if later else signed
    heads.see(first, real.ledger.proof)
    assert "signed after the one of size 2" in forked(heads.see, second, real.ledger.proof)


def test_heads_of_the_same_second_are_no_fork(real: RealLedger, heads: Heads) -> None:
    signed = [real.append("first"), real.append("second")]
    signed[1] = SignedHead.sign(KEY, replace(signed[1].head, at=signed[0].head.at))
    assert contradiction(*signed) is None


@pytest.mark.parametrize("update", ["../../settings", "/tmp/x", "A" * 64, 7, None])
def test_a_signed_receipt_whose_update_is_no_digest_is_refused_since_files_are_named_by_it(
    tmp_path: Path, update: Any
) -> None:
    """A hub can sign any entry."""
    hub = RealLedger(tmp_path / "hub")
    with hub.database.transaction() as tx:
        body = {"update": update, "verdict": "admitted", "contributor": "c" + "1" * 32, "server_round": 1}
        sequence = hub.ledger.append(tx, "verdict", body).sequence
        hub.ledger.sign_head(tx)
    proof = json.loads(json.dumps(hub.ledger.proof(sequence, 0).to_dict()))
    receipt = {"update": update, "verdict": "admitted", "proof": proof}
    with pytest.raises(GymError, match=r"is not a digest|update is missing or has the wrong type") as error:
        check_receipt(receipt, KEY.public_key)
    assert error.value.code is ErrorCode.SIGNATURE_INVALID
