"""A leaderboard: what is signed stays as it was signed, and only another key's run makes a line reproduced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.leaderboard.board import Leaderboard, records_folder
from gym_fed.evaluation.leaderboard.lines import Line, Reproduction, Submission, challenge_claim, sign_line
from gym_fed.evaluation.leaderboard.submissions import (
    Reproduced,
    drawn_samples,
    submit,
    verify,
)
from gym_fed.evaluation.records.document import samples_path
from gym_fed.evaluation.results import EvalResults, Figure, SampleResult
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.entries import Entry, canonical_text
from tests.support.evaluations import answer_task, choice_task, results_of

MINE, ANOTHER, THIRD = (SigningKey.generate() for _ in range(3))
RUN = results_of(
    choice_task("wet", [True, False, True] * 10), answer_task("sums", ["4", "5"] * 10), model="runs/mine"
)


def add(board: Path, results: EvalResults = RUN, key: SigningKey = MINE, name: str = "mine") -> Line:
    return submit(results, model_name=name, organization="me", board=board, key=key)


Change = Callable[[SampleResult], SampleResult]


def rerun_with(change: Change, source: EvalResults = RUN) -> Any:
    """Gives the samples that are asked for as they are in ``source``, changed."""

    def rerun(recorded: EvalResults, wanted: Mapping[str, Sequence[int]]) -> EvalResults:
        tasks = {
            name: replace(
                source.tasks[name],
                samples=tuple(change(s) for s in source.tasks[name].samples if s.number in numbers),
            )
            for name, numbers in wanted.items()
        }
        return replace(source, tasks=tasks)

    return rerun


def verified(
    board: Path, change: Change = lambda sample: sample, key: SigningKey = ANOTHER, **options: Any
) -> Reproduced:
    opened = Leaderboard(board)
    return verify(opened, opened.named("1"), rerun_with(change, **options), key, num_samples=50)


def status(board: Path) -> str:
    return Leaderboard(board).named("1").status


@pytest.fixture
def board(tmp_path: Path) -> Path:
    path = tmp_path / "leaderboard.jsonl"
    add(path)
    return path


def test_a_submission_is_self_reported_until_other_keys_reproduce_it(board: Path) -> None:
    assert status(board) == "self-reported"
    assert verified(board).differences == ()
    assert status(board) == "reproduced by 1"
    verified(board, key=THIRD)
    assert status(board) == "reproduced by 2"


def test_a_submission_names_weights_suite_and_samples(board: Path) -> None:
    (row,) = Leaderboard(board).board_rows.values()
    said = row.submission
    (document,) = records_folder(board).rglob("*-*.json")
    assert said.identity == dict(RUN.identity)
    assert [task.lock for task in said.tasks] == ["wet-lock", "sums-lock"]
    assert said.tasks[0].figures["acc"].value == pytest.approx(2 / 3)
    assert samples_path(document).is_file()
    assert "runs/mine" not in document.read_text()  # paths of the submitter's machine are not published


def test_lines_and_draws_are_those_of_the_page_without_our_code(board: Path) -> None:
    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    opened = Leaderboard(board)
    found = verify(opened, opened.named("1"), rerun_with(lambda sample: sample), ANOTHER, num_samples=20)
    before, lines = "0" * 64, [json.loads(line) for line in board.read_bytes().splitlines()]
    for number, line in enumerate(lines, 1):
        body, rest = line["body"], {key: line[key] for key in ("kind", "previous_hash", "sequence")}
        assert (rest["previous_hash"], rest["sequence"]) == (before, number)
        before = hashlib.sha256(canonical({"body": body, **rest})).hexdigest()
        assert line["hash"] == before
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(body["public_key"]))
        claim = {"gym-leaderboard-1": {"content": body["content"], **rest}}
        key.verify(bytes.fromhex(body["signature"]), canonical(claim))
    assert [line["kind"] for line in lines] == ["submitted", "reproduced"]
    content = lines[1]["body"]["content"]
    challenge = bytes.fromhex(content["challenge"])
    key.verify(challenge, canonical({"gym-leaderboard-challenge-1": lines[0]["hash"]}))
    places: list[int] = []
    turn = 0
    while len(places) < content["num_samples"]:
        drawn = int.from_bytes(hashlib.sha256(challenge + turn.to_bytes(8, "big")).digest(), "big") % 50
        places += [drawn] if drawn not in places else []
        turn += 1
    wet, sums = (task["num_samples"] for task in lines[0]["body"]["content"]["tasks"])
    assert (wet, sums) == (30, 20)
    assert found.drawn == {
        "wet": tuple(sorted(place for place in places if place < wet)),
        "sums": tuple(sorted(place - wet for place in places if place >= wet)),
    }


def test_the_same_key_cannot_reproduce_its_own_line(board: Path) -> None:
    with pytest.raises(GymError, match="must be reproduced with a different key") as caught:
        verified(board, key=MINE)
    assert caught.value.code is ErrorCode.PERMISSION_DENIED


def test_a_key_counts_once(board: Path) -> None:
    verified(board)
    with pytest.raises(GymError, match="counts only once"):
        verified(board)
    with pytest.raises(GymError, match="has submitted"):
        add(board)
    assert status(board) == "reproduced by 1"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda s: replace(s, logprobs=tuple(v - 0.002 for v in s.logprobs)),
            "log-likelihood differs by 0.002",
        ),
        (lambda s: replace(s, metrics={k: 1 - v for k, v in s.metrics.items()}), "acc is"),
        (lambda s: replace(s, row_sha256="0" * 64), "different row"),
        (lambda s: replace(s, prompt="easier"), "a different prompt"),
        (lambda s: replace(s, choices=(" yes", " maybe")), "different choices"),
        (lambda s: replace(s, token_ids=(9,), answer="9"), "no tie"),
        (lambda s: replace(s, token_ids=(9,), answer="9", margins=(0.001,)), "no tie"),
        (lambda s: replace(s, answer=None if s.answer is None else s.answer + "!"), "different text"),
    ],
)
def test_a_run_that_comes_out_otherwise_disputes_the_line(change: Change, problem: str, board: Path) -> None:
    def only_of_its_kind(sample: SampleResult) -> SampleResult:
        is_generation = problem in ("no tie", "different text")
        return change(sample) if (sample.answer is not None) == is_generation else sample

    found = verified(board, only_of_its_kind)
    assert any(problem in difference for _, _, difference in found.differences)
    assert status(board) == "disputed by 1"


def test_log_likelihoods_may_differ_by_a_thousandth(board: Path) -> None:
    assert not verified(board, lambda s: replace(s, logprobs=tuple(v + 9e-4 for v in s.logprobs))).differences


def test_answers_may_part_after_a_tie_that_both_runs_saw(tmp_path: Path) -> None:
    tied = results_of(answer_task("sums", ["4"] * 20, margin=0.005))
    add(tmp_path / "board.jsonl", tied)
    other = lambda s: replace(s, answer="9", token_ids=(9,), metrics={"exact_match": 0.0})  # noqa: E731
    assert (found := verified(tmp_path / "board.jsonl", other, source=tied)).parted == 20
    assert found.differences == ()


def test_a_tie_that_only_the_record_claims_is_no_tie(tmp_path: Path) -> None:
    claimed = results_of(answer_task("sums", ["4"] * 20, margin=0.0))
    add(tmp_path / "board.jsonl", claimed)
    other = lambda s: replace(s, answer="9", token_ids=(9,), margins=(2.0,))  # noqa: E731
    assert len(verified(tmp_path / "board.jsonl", other, source=claimed).differences) == 20


def test_another_model_or_other_rows_are_refused_before_anything_is_signed(board: Path) -> None:
    with pytest.raises(GymError, match="the model differs: "):
        verified(board, source=replace(RUN, identity={**RUN.identity, "model": "f" * 64}))
    wet = replace(RUN.tasks["wet"], lock="other")
    with pytest.raises(GymError, match="task wet: its definition or rows"):
        verified(board, source=replace(RUN, tasks={**RUN.tasks, "wet": wet}))
    assert status(board) == "self-reported"


@pytest.mark.parametrize("part", ["model", "delta", "template"])
def test_another_delta_or_template_is_refused_before_anything_is_signed(part: str, board: Path) -> None:
    other = replace(RUN, identity={**RUN.identity, part: "another"})
    with pytest.raises(GymError, match=f"the {part} differs: another here") as caught:
        verified(board, source=other)
    assert caught.value.code is ErrorCode.BASE_MISMATCH
    assert status(board) == "self-reported"


def test_figures_that_the_samples_do_not_have_are_not_submitted(tmp_path: Path) -> None:
    better = replace(RUN.tasks["wet"], figures={"acc": Figure(0.99, 0.01, 30)})
    with pytest.raises(GymError, match=r"the record states 0\.99, but the samples give 0\.66"):
        add(tmp_path / "b.jsonl", results_of(better))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("values", [[0.25, 50.5], [0.5, float("nan")], [0.5, None]])
def test_a_figure_that_is_no_mean_of_its_samples_values_is_not_submitted(
    values: list[float | None], tmp_path: Path
) -> None:
    task = RUN.tasks["wet"]
    samples = tuple(
        replace(sample, metrics={} if value is None else {"chrf": value})
        for sample, value in zip(task.samples, values, strict=False)
    )
    forged = replace(task, figures={"chrf": Figure(88.0, 1.0, 2)}, samples=samples)
    with pytest.raises(GymError, match=r"the samples give|have no value") as caught:
        add(tmp_path / "b.jsonl", results_of(forged))
    assert caught.value.code is ErrorCode.DATA_INVALID
    if values == [0.25, 50.5]:
        add(tmp_path / "b.jsonl", results_of(replace(forged, figures={"chrf": Figure(25.375, 1.0, 2)})))


def test_figures_of_a_whole_set_need_not_be_a_mean(tmp_path: Path) -> None:
    task = RUN.tasks["wet"]
    samples = tuple(replace(sample, metrics={"inst_level_strict_acc": 1.0}) for sample in task.samples)
    figures = {"inst_level_strict_acc": Figure(0.75, None, len(samples))}
    add(tmp_path / "b.jsonl", results_of(replace(task, task="ifeval", figures=figures, samples=samples)))
    with pytest.raises(GymError, match="the samples give"):
        add(tmp_path / "c.jsonl", results_of(replace(task, task="other", figures=figures, samples=samples)))


def test_a_record_that_was_exchanged_is_not_verified(board: Path) -> None:
    (samples,) = records_folder(board).rglob("*_samples.jsonl")
    samples.write_bytes(samples.read_bytes().replace(b"is water wet", b"is water dry"))
    with pytest.raises(GymError, match="is not in"):
        verified(board)


def test_a_line_whose_figures_are_not_its_records_is_not_verified(tmp_path: Path) -> None:
    path = tmp_path / "leaderboard.jsonl"
    line = add(path)
    assert isinstance(line.content, Submission)
    path.unlink()
    said = line.content.model_dump(mode="json")
    said["tasks"][0]["figures"]["acc"]["value"] = 0.9
    Leaderboard(path).add(Submission.model_validate(said), MINE)
    with pytest.raises(GymError, match="differs from the line"):
        verified(path)


def test_which_samples_are_drawn_depends_on_line_and_key_and_nothing_else(board: Path) -> None:
    tasks = Leaderboard(board).named("1").submission.tasks
    one, same, other = (key.sign(challenge_claim("a" * 64)) for key in (MINE, MINE, ANOTHER))
    draws = [drawn_samples(challenge, tasks, 16) for challenge in (one, same, other)]
    assert draws[0] == draws[1] != draws[2]
    assert sum(map(len, draws[0].values())) == 16
    assert drawn_samples(MINE.sign(challenge_claim("b" * 64)), tasks, 16) != draws[0]
    assert {k: len(v) for k, v in drawn_samples(one, tasks, 50).items()} == {"wet": 30, "sums": 20}


Lines = list[dict[str, Any]]


def _body(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = line["body"]
    return found


def _rechained(lines: Lines) -> Lines:
    """With numbers and hashes as an honest board has them; signatures stay what they were."""
    last: Entry | None = None
    made = []
    for line in lines:
        last = Entry.following((last.sequence, last.hash) if last else None, line["kind"], line["body"])
        made.append(last.to_dict())
    return made


@pytest.mark.parametrize(
    ("forge", "code"),
    [
        (lambda ls: _body(ls[0])["content"].update(model_name="yours"), ErrorCode.STATE_CORRUPT),
        (lambda ls: ls.reverse(), ErrorCode.STATE_CORRUPT),
        (lambda ls: ls.pop(0), ErrorCode.STATE_CORRUPT),
        (lambda ls: ls.__setitem__(slice(None), _rechained(ls[::-1])), ErrorCode.SIGNATURE_INVALID),
        (lambda ls: ls.__setitem__(slice(None), _rechained(ls[1:])), ErrorCode.SIGNATURE_INVALID),
        (lambda ls: ls.__setitem__(slice(None), _rechained([ls[0], ls[0]])), ErrorCode.SIGNATURE_INVALID),
        (
            lambda ls: (
                _body(ls[0]).update(signature="00" * 64),
                ls.__setitem__(slice(None), _rechained(ls)),
            ),
            ErrorCode.SIGNATURE_INVALID,
        ),
        (
            lambda ls: (
                _body(ls[0]).update(public_key=THIRD.public_key.hex()),
                ls.__setitem__(slice(None), _rechained(ls)),
            ),
            ErrorCode.SIGNATURE_INVALID,
        ),
        (
            lambda ls: (_body(ls[0]).update(more=1), ls.__setitem__(slice(None), _rechained(ls))),
            ErrorCode.STATE_CORRUPT,
        ),
    ],
    ids=["altered", "reversed", "first-gone", "resorted", "cut-out", "doubled", "unsigned", "taken", "more"],
)
def test_a_board_that_was_tampered_with_is_refused_with_its_line(
    forge: Callable[[Lines], object], code: ErrorCode, board: Path
) -> None:
    add(board, key=THIRD, name="theirs")
    lines = [json.loads(line) for line in board.read_text().splitlines()]
    forge(lines)
    board.write_text("".join(canonical_text(line) + "\n" for line in lines))
    with pytest.raises(GymError, match=r"leaderboard\.jsonl, line [12]: ") as caught:
        Leaderboard(board)
    assert caught.value.code is code


@pytest.mark.parametrize("tail", [b"{}", b"[" * 100_000 + b"\n", b"\xff\n", b"\n", b'{"a":1}\n', b"null\n"])
def test_what_is_no_line_is_refused(tail: bytes, board: Path) -> None:
    board.write_bytes(board.read_bytes() + tail)
    with pytest.raises(GymError, match="line 2"):
        Leaderboard(board)


def test_a_giant_line_is_refused_before_it_is_read(board: Path) -> None:
    with board.open("ab") as file:
        file.truncate(4 << 20)  # a line that is not there on the disk
    with pytest.raises(GymError, match="line 2") as caught:
        Leaderboard(board)
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_giant_board_is_refused_before_it_is_read(board: Path) -> None:
    with board.open("ab") as file:
        file.truncate(1 << 40)
    for use in (lambda: Leaderboard(board), lambda: add(board, key=THIRD)):
        with pytest.raises(GymError, match=r"exceeds the limits? of a leaderboard") as caught:
            use()
        assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_board_that_was_cut_at_its_end_lacks_the_head_that_was_seen(board: Path) -> None:
    add(board, key=THIRD, name="theirs")
    head = Leaderboard(board).head
    Leaderboard(board, head=head)
    board.write_text(board.read_text().splitlines(keepends=True)[0])
    Leaderboard(board)
    with pytest.raises(GymError, match="lines are missing at the end"):
        Leaderboard(board, head=head)


def _appended(board: Path, content: Reproduction, key: SigningKey) -> None:
    """As somebody would who writes the file with a program of their own."""
    line = sign_line(content, key, Leaderboard(board).last)
    with board.open("a") as file:
        file.write(canonical_text(line.entry.to_dict()) + "\n")


@pytest.mark.parametrize(
    ("key", "changes", "problem"),
    [
        (MINE, {}, "must be reproduced with a different key"),
        (ANOTHER, {"line": "0" * 64}, "which is not the hash of an earlier line"),
        (ANOTHER, {"num_samples": 3}, "re-ran 3 of 50"),
        (ANOTHER, {"num_samples": 51}, "re-ran 51 of 50"),
        (ANOTHER, {"challenge": "00" * 64}, "signature"),
    ],
)
def test_a_forged_reproduction_is_refused_by_every_reader(
    key: SigningKey, changes: dict[str, Any], problem: str, board: Path
) -> None:
    digest = changes.get("line", Leaderboard(board).head)
    claim = {
        "line": digest,
        "challenge": key.sign(challenge_claim(digest)).hex(),
        "num_samples": 32,
        "outcome": "reproduced",
        "parted": 0,
        "engine": "mine",
        "at": 1,
        **changes,
    }
    _appended(board, Reproduction.model_validate(claim), key)
    with pytest.raises(GymError, match=problem):
        Leaderboard(board)


def test_a_second_reproduction_by_one_key_is_refused_by_every_reader(board: Path) -> None:
    found = verified(board).line.content
    assert isinstance(found, Reproduction)
    _appended(board, found, ANOTHER)
    with pytest.raises(GymError, match="a key counts only once"):
        Leaderboard(board)


def test_a_torn_last_line_is_dropped_when_another_is_added(board: Path) -> None:
    with board.open("ab") as file:
        file.write(b'{"body":{"cont')
    add(board, key=THIRD, name="theirs")
    assert len(Leaderboard(board).board_rows) == 2


@pytest.mark.parametrize("name", ["", " x", "a\nb", "x" * 97, "\u202egnp", "a\u0000"])
def test_a_name_that_would_deceive_readers_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="visible characters"):
        add(tmp_path / "b.jsonl", name=name)
    assert not list(tmp_path.iterdir())
