"""Audits of updates: an honest training passes, false ones fail, and answers that cannot be used are refused."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_client.agent.data import Data
from gym_client.agent.global_model import GlobalModel
from gym_client.agent.tasks import TaskFolder
from gym_client.audits.answer import AuditAnswer, write_answer
from gym_client.audits.check import repeat_steps
from gym_client.audits.draws import Draw, Draws, drop_unneeded
from gym_client.audits.evidence import Evidence, begin_record, drop_all, drop_expired, kept_evidence
from gym_client.identity.home import Home
from safetensors.torch import load_file, save_file

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.audit import AuditTerms
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.task import TaskSpec, TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.delta.encode import lora_delta
from gym_fed.training.audits.recorder import StepRecorder, read_leaves, state_path
from gym_fed.training.audits.states import state_digest, take_state, trained_parameters
from gym_fed.training.trainer import Trainer
from gym_fed.training.tuning.lora import lora_factors
from gym_fed.trust.identity.manifest import UpdateManifest, new_nonce

STEPS = 4
ROWS = [
    {"text": f"{word} is written {number} times: {word * 4}"} for number, word in enumerate("abcdefgh", 1)
]
MAX_BYTES = 64 << 20


@pytest.fixture(scope="module")
def model(tiny_base: Path) -> GlobalModel:
    return GlobalModel(str(tiny_base))


@pytest.fixture(scope="module")
def honest(model: GlobalModel, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return contribution(model, tmp_path_factory.mktemp("honest"))


def task(model: GlobalModel) -> TaskSpec:
    recipe = TrainingRecipe(
        algorithm="pretrain", finetuning="lora", max_steps=STEPS, per_device_train_batch_size=2, max_length=32
    )
    return TaskSpec(
        server="s" + "0" * 16,
        server_round=1,
        base_model="tiny",
        base_digest=model.base.digest,
        version_digest=model.base.digest,
        recipe=recipe,
        codec=CodecPolicy(error_feedback=False),
        max_update_bytes=1 << 20,
        deadline_seconds=1.0,
        audit=AuditTerms(rows="disclosed"),
    )


def contribution(
    model: GlobalModel,
    folder: Path,
    rows: list[dict[str, Any]] = ROWS,
    recorder: Callable[[Path, int], StepRecorder] = StepRecorder,
    falsify: Callable[[Path], None] = lambda folder: None,
    num_examples: int = len(ROWS),
) -> Evidence:
    """Train and commit; ``falsify`` may change the record and the delta before the commitment."""
    spec, record = task(model), folder / "record"
    config = round_training(spec.recipe, 1, folder / "run", "cpu")
    observer = recorder(record, MAX_BYTES)
    trainer = Trainer(config, model=model.model, tokenizer=model.tokenizer, observer=observer)
    result = trainer.train(dataset=rows)
    lora_delta(
        lora_factors(result.model), record / "update.gymdelta", model.version_spec(spec), policy=spec.codec
    )
    result.model.unload()
    model.restore()
    (record / "task.json").write_text(json.dumps(spec.model_dump(mode="json")))
    (record / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    falsify(record)
    manifest = UpdateManifest(
        contributor="c" + "0" * 32,
        server=spec.server,
        task="task",
        server_round=1,
        base_digest=spec.version_digest,
        delta_sha256=_sha256(record / "update.gymdelta"),
        delta_bytes=(record / "update.gymdelta").stat().st_size,
        nonce=new_nonce(),
        issued_at_seconds=0,
        expires_at_seconds=1,
        num_examples=num_examples,
        training_root=observer.root(),
    )
    (record / "manifest.json").write_text(json.dumps(manifest.model_dump(mode="json")))
    return Evidence(record)


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def drawn(evidence: Evidence, *steps: int) -> Draw:
    manifest, spec = evidence.manifest, evidence.task
    assert spec.audit is not None
    digest = canonical_digest(spec.model_dump(mode="json"))
    return Draw(manifest.digest, manifest.contributor, 1, steps, STEPS, digest, spec.audit, 0)


def audit(
    model: GlobalModel,
    evidence: Evidence,
    folder: Path,
    *steps: int,
    public: list[dict[str, Any]] | None = None,
) -> tuple[dict[int, float], str]:
    draw = drawn(evidence, *steps)
    write_answer(folder / "answer", evidence, draw)
    return repeat_steps(
        AuditAnswer.open(folder / "answer", draw, MAX_BYTES),
        draw,
        model,
        lambda sha256: folder / sha256,
        public,
        "cpu",
    )


def rewrite_states(record: Path, change: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
    """Change the recorded states and their digests, as a cheating contributor does before the commitment."""
    leaves = read_leaves(record)
    for step, leaf in enumerate(leaves):
        state = load_file(state_path(record, step))
        change(step, state)
        save_file(state, state_path(record, step))
        leaf["state"] = state_digest(state)
    (record / "leaves.jsonl").write_text("".join(json.dumps(leaf) + "\n" for leaf in leaves))


def test_an_honest_training_passes_with_every_step_repeated_to_the_bit(
    model: GlobalModel, honest: Evidence, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in model.tensors.items()}
    distances, problem = audit(model, honest, tmp_path, 1, 2, 3, 4, public=ROWS)
    assert problem == ""
    assert distances == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}
    after = dict(model.model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name in after)


def test_a_recorded_training_ends_like_one_that_is_not_recorded(
    model: GlobalModel, honest: Evidence, tmp_path: Path
) -> None:
    config = round_training(task(model).recipe, 1, tmp_path / "run", "cpu")
    result = Trainer(config, model=model.model, tokenizer=model.tokenizer).train(dataset=ROWS)
    last = load_file(state_path(honest.folder, STEPS))
    weights = take_state(trained_parameters(result.model))["weights"]
    result.model.unload()
    model.restore()
    assert weights.numel() > 100
    assert torch.equal(weights, last["weights"])


def test_one_relabelled_step_is_caught_although_its_honest_batch_is_committed(
    model: GlobalModel, tmp_path: Path
) -> None:
    class Relabelling(StepRecorder):
        def attach(self, trainer: Any) -> None:
            compute = trainer.training_step

            def relabelled(model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
                if trainer.state.global_step == 2:
                    inputs = {**inputs, "labels": inputs["labels"].clone()}
                    inputs["labels"][0, 5] = (inputs["labels"][0, 5] + 1) % 100
                return compute(model, inputs, *args, **named)

            trainer.training_step = relabelled
            super().attach(trainer)

    cheat = contribution(model, tmp_path, recorder=Relabelling)
    (tmp_path / "others").mkdir()
    assert audit(model, cheat, tmp_path / "others", 1, 2)[1] == ""
    distances, problem = audit(model, cheat, tmp_path, 3)
    assert "step 3: the relative difference is" in problem
    assert distances[3] > 0.01


def test_a_random_update_under_a_made_up_record_is_caught(model: GlobalModel, tmp_path: Path) -> None:
    def falsify(record: Path) -> None:
        def randomise(step: int, state: dict[str, torch.Tensor]) -> None:
            torch.manual_seed(step)
            for name in state:
                state[name] = state[name] + (1e-3 * torch.rand(state[name].shape) if step else 0.0)

        rewrite_states(record, randomise)

    problem = audit(model, contribution(model, tmp_path, falsify=falsify), tmp_path, 2)[1]
    assert "step 2: the relative difference is" in problem


def test_an_older_update_under_a_true_record_is_caught(
    model: GlobalModel, honest: Evidence, tmp_path: Path
) -> None:
    def falsify(record: Path) -> None:
        (record / "update.gymdelta").write_bytes(honest.delta_path.read_bytes())

    other = [{"text": row["text"].upper()} for row in ROWS]
    cheat = contribution(model, tmp_path, rows=other, falsify=falsify)
    assert audit(model, cheat, tmp_path, 2)[1] == "the delta does not match the final state of the training"


def test_made_up_moments_that_would_explain_any_step_are_caught(model: GlobalModel, tmp_path: Path) -> None:
    """Weights alone do not show it: a moment in the state after step 2 is chosen, and step 2 is drawn."""

    def falsify(record: Path) -> None:
        def steer(step: int, state: dict[str, torch.Tensor]) -> None:
            for name in state:
                if step == 2 and name == "exp_avg":
                    state[name] = -state[name]

        rewrite_states(record, steer)

    problem = audit(model, contribution(model, tmp_path, falsify=falsify), tmp_path, 2)[1]
    assert "step 2: the relative difference is 2, above" in problem


def test_training_that_begins_from_another_adapter_is_caught(model: GlobalModel, tmp_path: Path) -> None:
    def falsify(record: Path) -> None:
        def shift(step: int, state: dict[str, torch.Tensor]) -> None:
            for name in state:
                state[name] = state[name] + (0.0 if step else 0.01)

        rewrite_states(record, shift)

    problem = audit(model, contribution(model, tmp_path, falsify=falsify), tmp_path, 3)[1]
    assert problem == "training did not start from the recipe's adapter"


def test_rows_other_than_those_of_the_training_are_caught(
    model: GlobalModel, honest: Evidence, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (honest.folder / "rows.jsonl").read_text().splitlines()]
    assert (
        "training row 1 is not one of the public rows"
        in audit(model, honest, tmp_path, 1, public=rows[1:])[1]
    )
    draw = drawn(honest, 1, 2, 3, 4)
    write_answer(tmp_path / "answer-2", honest, draw)
    answer = AuditAnswer.open(tmp_path / "answer-2", draw, MAX_BYTES)
    answer.document = answer.document.model_copy(update={"rows": [{"text": "quite another row"}, *rows[1:]]})
    problem = repeat_steps(answer, draw, model, lambda sha256: tmp_path / sha256, None, "cpu")[1]
    assert "differs from the recorded one" in problem


def test_a_claim_of_more_examples_than_the_rows_is_caught(model: GlobalModel, tmp_path: Path) -> None:
    cheat = contribution(model, tmp_path, num_examples=80)
    assert audit(model, cheat, tmp_path, 1)[1] == "the update claims 80 examples, but these rows have 8"


def test_a_training_that_was_stopped_and_resumed_commits_to_the_same_root(
    model: GlobalModel, honest: Evidence, tmp_path: Path
) -> None:
    config = round_training(task(model).recipe, 1, tmp_path / "run", "cpu")
    record = tmp_path / "record"

    def train(should_stop: Callable[[], bool]) -> Any:
        observer = StepRecorder(record, MAX_BYTES)
        trainer = Trainer(
            config, model=model.model, tokenizer=model.tokenizer, observer=observer, should_stop=should_stop
        )
        return observer, trainer.train(dataset=ROWS)

    with pytest.raises(GymError) as caught:
        train(lambda: len(read_leaves(record)) == 3)
    assert caught.value.code is ErrorCode.INTERRUPTED
    model.restore()
    # A step that no checkpoint covers is repeated, and replaced in the record.
    with (record / "leaves.jsonl").open("a") as file:
        file.write("{}\n")
    observer, result = train(lambda: False)
    result.model.unload()
    model.restore()
    assert observer.root() == honest.manifest.training_root


def test_evidence_is_deleted_when_it_was_not_drawn_has_a_verdict_or_is_too_old(
    honest: Evidence, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for update in ("drawn", "undrawn", "judged", "unknown", "old"):
        shutil.copytree(honest.folder, home.audits / update)
    draws = Draws()
    draws.considered = {"drawn", "undrawn", "judged"}
    draws.drawn = {"drawn": drawn(honest, 1), "judged": replace(drawn(honest, 1), verdict="audited")}
    server = honest.task.server
    drop_unneeded(home, "s" + "1" * 16, draws)
    assert len(list(kept_evidence(home))) == 5, "another hub's ledger says nothing about them"
    drop_unneeded(home, server, draws)
    assert [evidence.update for evidence in kept_evidence(home)] == ["drawn", "old", "unknown"]
    signed, day = honest.manifest.issued_at_seconds, 86400
    later = honest.manifest.model_copy(update={"issued_at_seconds": signed + day})
    (home.audits / "drawn" / "manifest.json").write_text(later.model_dump_json())
    longer = honest.task.model_copy(update={"deadline_seconds": signed + day})
    (home.audits / "unknown" / "task.json").write_text(longer.model_dump_json())
    monkeypatch.setattr(time, "time", lambda: signed + 8.5 * day)
    drop_expired(home, server, signed + 7.5 * day)
    drop_expired(home, "s" + "1" * 16, signed + 100 * day)
    assert [evidence.update for evidence in kept_evidence(home)] == ["drawn", "old", "unknown"]
    drop_expired(home, server, signed + 100 * day)
    assert [evidence.update for evidence in kept_evidence(home)] == ["drawn", "unknown"], (
        "by the earlier clock"
    )
    monkeypatch.setattr(time, "time", lambda: signed + 15.5 * day)
    drop_expired(home, "s" + "1" * 16, signed)
    assert len(list(kept_evidence(home))) == 2, "another hub's is kept for a week more"
    monkeypatch.setattr(time, "time", lambda: signed + 16.5 * day)
    drop_expired(home, "s" + "1" * 16, signed)
    assert list(kept_evidence(home)) == []


def test_leaving_a_hub_deletes_its_evidence_and_no_other(honest: Evidence, home: Home) -> None:
    shutil.copytree(honest.folder, home.audits / "kept")
    drop_all(home, "s" + "1" * 16)
    assert len(list(kept_evidence(home))) == 1
    drop_all(home, honest.task.server)
    assert list(kept_evidence(home)) == []


def test_evidence_that_was_half_deleted_when_the_process_was_killed_is_gone_at_the_next_listing(
    honest: Evidence, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(honest.folder, home.audits / "kept")

    def killed(folder: Path) -> None:
        (folder / "task.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            drop_all(home, honest.task.server)
    drop_all(home, honest.task.server)
    assert list(kept_evidence(home)) == []
    assert list(home.audits.iterdir()) == []


def test_evidence_with_an_unreadable_task_is_named_with_its_folder(honest: Evidence, home: Home) -> None:
    shutil.copytree(honest.folder, home.audits / "kept")
    (home.audits / "kept" / "task.json").write_text("{}")
    with pytest.raises(GymError, match=r"task\.json is not a task") as caught:
        drop_expired(home, honest.task.server, 0.0)
    assert caught.value.code is ErrorCode.STATE_CORRUPT
    assert str(home.audits / "kept") in str(caught.value.hint)


def test_evidence_counts_towards_the_policys_bytes(model: GlobalModel, honest: Evidence, home: Home) -> None:
    shutil.copytree(honest.folder, home.audits / "kept")
    folder = TaskFolder(home.task_folder("task"))
    data = Data(ROWS, "rows", "digest")
    size = Evidence(honest.folder).size_bytes()
    assert begin_record(home, task(model), folder, data, size + 7, 0.0).max_bytes == 7
    assert begin_record(home, task(model), folder, data, size - 7, 0.0).max_bytes == 0


@pytest.fixture
def answer_path(honest: Evidence, tmp_path: Path) -> Path:
    write_answer(tmp_path / "answer", honest, drawn(honest, 2))
    return tmp_path / "answer"


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Write the answer again with its document and tensors changed."""
    tensors = load_file(path)
    document = json.loads(bytes(tensors["document"].tolist()))
    change(document, tensors)
    tensors["document"] = torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)
    save_file(tensors, path)
    return path


def refusal(path: Path, draw: Draw, max_bytes: int = MAX_BYTES) -> GymError:
    with pytest.raises(GymError) as caught:
        AuditAnswer.open(path, draw, max_bytes)
    return caught.value


def test_a_forged_proof_is_refused_by_its_step(honest: Evidence, answer_path: Path) -> None:
    def forge(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        document["leaves"][1]["state"] = "0" * 64

    error = refusal(changed(answer_path, forge), drawn(honest, 2))
    assert error.code is ErrorCode.AUDIT_INVALID
    assert "the proof of step 1 does not lead to the update's training_root" in error.message


def test_a_state_that_was_not_committed_to_is_refused(honest: Evidence, answer_path: Path) -> None:
    def swap(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.startswith("2/"))
        tensors[name] = tensors[name] + 1.0

    draw = drawn(honest, 2)
    answer = AuditAnswer.open(changed(answer_path, swap), draw, MAX_BYTES)
    first = load_file(state_path(honest.folder, 0))
    with pytest.raises(GymError, match="the state of step 2 does not match the update's commitment"):
        answer.state(2, first["weights"].numel())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda document, tensors: document.update(leaves=document["leaves"][:-1]),
            "does not contain the drawn steps",
        ),
        (
            lambda document, tensors: document["task"].update(server_round=2),
            "its task differs from the task of round 1",
        ),
        (lambda document, tensors: document.update(extra=1), "its document: extra"),
        (
            lambda document, tensors: tensors.update(delta=tensors["delta"][:-1]),
            "its delta differs from the update's delta",
        ),
        (lambda document, tensors: tensors.update(stray=torch.zeros(1)), "unexpected tensor 'stray'"),
        (lambda document, tensors: document["manifest"].update(num_examples=7), "it is for update"),
        (lambda document, tensors: tensors.update(delta=torch.zeros(3)), "its delta is not a uint8 vector"),
    ],
)
def test_a_malformed_answer_is_refused_with_what_is_wrong(
    honest: Evidence, answer_path: Path, change: Callable[..., None], message: str
) -> None:
    error = refusal(changed(answer_path, change), drawn(honest, 2))
    assert error.code is ErrorCode.AUDIT_INVALID
    assert message in error.message


def test_a_state_with_other_tensors_or_not_finite_values_is_refused(
    honest: Evidence, answer_path: Path
) -> None:
    count = load_file(state_path(honest.folder, 0))["weights"].numel()
    draw = drawn(honest, 2)
    for value, message in (
        (torch.full((count,), float("nan")), "non-finite values"),
        (torch.zeros(1), "is not a float32 vector of"),
        (torch.zeros(1, count), "is not a float32 vector of"),
        (torch.zeros(count, dtype=torch.float64), "is not a float32 vector of"),
        (None, "must have exactly weights, exp_avg, exp_avg_sq"),
    ):

        def put(document: Any, tensors: Any, value: torch.Tensor | None = value) -> None:
            tensors.pop("2/weights")
            if value is not None:
                tensors["2/weights"] = value

        path = answer_path.with_name("changed")
        path.write_bytes(answer_path.read_bytes())
        answer = AuditAnswer.open(changed(path, put), draw, MAX_BYTES)
        with pytest.raises(GymError, match=message) as caught:
            answer.state(2, count)
        assert caught.value.code is ErrorCode.AUDIT_INVALID


def test_an_enormous_answer_is_refused_before_it_is_read(honest: Evidence, answer_path: Path) -> None:
    draw = drawn(honest, 2)
    assert refusal(answer_path, draw, max_bytes=1000).code is ErrorCode.TOO_LARGE
    answer_path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    assert refusal(answer_path, draw).code is ErrorCode.AUDIT_INVALID
    answer_path.write_bytes(b"not a safetensors file at all")
    assert refusal(answer_path, draw).code is ErrorCode.AUDIT_INVALID


def test_states_beyond_the_policys_bytes_refuse_the_task_before_a_step(
    model: GlobalModel, tmp_path: Path
) -> None:
    with pytest.raises(GymError, match="the recorded states of 4 steps need") as caught:
        contribution(model, tmp_path, recorder=lambda folder, _: StepRecorder(folder, 1000))
    model.restore()
    assert caught.value.code is ErrorCode.POLICY_REFUSED


def test_the_answer_to_a_record_that_was_changed_is_not_written(honest: Evidence, tmp_path: Path) -> None:
    draw = replace(drawn(honest, 2), num_steps=STEPS + 1)
    with pytest.raises(GymError, match="does not match the training record that update"):
        write_answer(tmp_path / "answer", honest, draw)
    assert not (tmp_path / "answer").exists()
