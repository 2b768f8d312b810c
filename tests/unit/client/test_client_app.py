"""One round on the contributor's machine, through the Flower app, on a real (tiny) model."""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict
from gym_client.agent import global_model as models
from gym_client.agent import hooks
from gym_client.agent.hooks import Hooks, hooks_set
from gym_client.agent.policy import Policy
from gym_client.agent.residuals import Residuals
from gym_client.agent.tasks import TaskFolder
from gym_client.app import app
from gym_client.identity.home import Home
from transformers import Qwen3ForCausalLM

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import next_digest
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec, model_tensors
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.wire.limits import DELTA_STYPE

SERVER = "s" + "0" * 16
RECIPE = {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 32, "learning_rate": 1e-2}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_loaded", {})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"double: {c}"}, {"role": "assistant", "content": c * 2}]}
        for c in "abcdefgh"
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reference(parent: str, soup: bytes, server_round: int) -> dict[str, Any]:
    """A soup as a task names it, and the version that it makes of ``parent``."""
    name = hashlib.sha256(soup).hexdigest()
    digest = next_digest(parent, name, server_round)
    return {"sha256": name, "size_bytes": len(soup), "version_digest": digest, "server_round": server_round}


class Rounds:
    """Calls the app as the agent, or as stock Flower, would."""

    def __init__(self, home: Home, data: Path, base: Path) -> None:
        self.home, self.data, self.base = home, data, base
        self.spec = BaseSpec.of(load_model(str(base)).model, "tiny")

    def task(self, **changes: Any) -> dict[str, Any]:
        fields = {
            "server": SERVER,
            "server_round": 1,
            "base_model": "tiny",
            "base_digest": self.spec.digest,
            "version_digest": self.spec.digest,
            "recipe": RECIPE,
            "max_update_bytes": 1 << 20,
            "deadline_seconds": 4e9,
        }
        return {**fields, **changes}

    def call(
        self,
        task: dict[str, Any],
        message_id: str = "m1",
        soups: dict[str, bytes] | None = None,
        **config: Any,
    ) -> RecordDict:
        arrays = {
            name: Array(dtype="uint8", shape=(len(blob),), stype=DELTA_STYPE, data=blob)
            for name, blob in (soups or {}).items()
        }
        content = RecordDict({"task": ConfigRecord({"spec": json.dumps(task)}), "soups": ArrayRecord(arrays)})
        metadata = Metadata(1, message_id, 1, 2, "", "1", 0.0, 1e12, "train")
        node_config = {
            "home": str(self.home.folder),
            "data": str(self.data),
            "model": str(self.base),
            **config,
        }
        context = Context(run_id=1, node_id=2, node_config=node_config, state=RecordDict(), run_config={})
        return app(Message(content=content, metadata=metadata), context).content

    def refused(self, code: ErrorCode, task: dict[str, Any], **config: Any) -> str:
        with pytest.raises(GymError) as caught:
            self.call(task, **config)
        assert caught.value.code is code, caught.value
        return str(caught.value)

    def soup(self, tmp_path: Path, scale: float, parent: str) -> bytes:
        tensors = model_tensors(load_model(str(self.base)).model)
        tuned = {name: tensor + scale for name, tensor in tensors.items()}
        policy = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)
        path = tmp_path / f"soup{scale}"
        encode_delta(tuned, tensors, policy, path, BaseSpec("tiny", parent, self.spec.shapes))
        return path.read_bytes()


@pytest.fixture
def rounds(home: Home, data: Path, tiny_base: Path) -> Rounds:
    return Rounds(home, data, tiny_base)


def manifest_of(reply: RecordDict) -> UpdateManifest:
    return UpdateManifest.parse(str(reply["update"]["manifest"]))


def test_a_round_gives_a_signed_valid_delta_that_lowers_the_loss(rounds: Rounds, tmp_path: Path) -> None:
    reply = rounds.call(rounds.task(recipe={**RECIPE, "max_steps": 20}))
    manifest = manifest_of(reply)
    manifest.verify(reply["update"]["public_key"], reply["update"]["signature"])
    assert (manifest.contributor, manifest.server, manifest.num_examples) == (
        rounds.home.key.contributor,
        SERVER,
        8,
    )
    ((name, array),) = reply["delta"].items()
    assert name == manifest.delta_sha256 == hashlib.sha256(array.data).hexdigest()
    assert reply["metrics"]["num-examples"] == 8
    assert reply["metrics"]["train_loss"] < reply["metrics"]["first_loss"]
    (tmp_path / "got").write_bytes(array.data)
    with DeltaFile.open(tmp_path / "got", rounds.spec) as delta:
        assert delta.norm() == pytest.approx(manifest.metrics["update_norm"], rel=1e-6)


def test_the_agent_gets_a_reference_and_the_file_waits_in_the_task_folder(rounds: Rounds) -> None:
    reply = rounds.call(rounds.task(), **{"by-reference": True})
    ((name, array),) = reply["delta"].items()
    assert array.data == b""
    folder = TaskFolder(rounds.home.task_folder("m1"))
    assert hashlib.sha256(folder.delta_path.read_bytes()).hexdigest() == name
    assert array.shape == (folder.delta_path.stat().st_size,)


def test_a_second_start_gives_the_same_update_with_the_same_nonce(rounds: Rounds) -> None:
    first = manifest_of(rounds.call(rounds.task(), **{"by-reference": True}))
    steps: list[str] = []
    with hooks_set(Hooks(lambda phase, done, total, loss: steps.append(phase))):
        assert manifest_of(rounds.call(rounds.task(), **{"by-reference": True})) == first
    assert steps == []


def test_an_interrupted_round_goes_on_from_its_checkpoint_to_the_same_bytes(
    rounds: Rounds, tmp_path: Path
) -> None:
    task = rounds.task(recipe={**RECIPE, "max_steps": 6})
    seen: list[int] = []
    hooks = Hooks(lambda phase, done, total, loss: seen.append(done), lambda: bool(seen) and seen[-1] >= 3)
    with hooks_set(hooks), pytest.raises(GymError) as caught:
        rounds.call(task, **{"by-reference": True})
    assert caught.value.code is ErrorCode.INTERRUPTED
    models._loaded.clear()
    later: list[int] = []
    with hooks_set(Hooks(lambda phase, done, total, loss: later.append(done) if loss is not None else None)):
        resumed = rounds.call(task, **{"by-reference": True})
    assert later[0] > 3
    assert later[-1] == 6
    other = Rounds(Home.open(tmp_path / "other"), rounds.data, rounds.base)
    whole = other.call(task, **{"by-reference": True})
    assert manifest_of(resumed).delta_sha256 == manifest_of(whole).delta_sha256


def test_work_is_taken_over_when_the_task_comes_again_under_another_id(rounds: Rounds) -> None:
    first = manifest_of(rounds.call(rounds.task(), "m1", **{"by-reference": True}))
    second = manifest_of(rounds.call(rounds.task(), "m2", **{"by-reference": True}))
    assert second.delta_sha256 == first.delta_sha256
    assert (second.task, first.task) == ("m2", "m1")
    assert second.nonce != first.nonce
    assert not rounds.home.task_folder("m1").exists()


def test_soups_are_applied_in_order_and_the_delta_is_against_the_version(
    rounds: Rounds, tmp_path: Path
) -> None:
    first = rounds.soup(tmp_path, 0.25, rounds.spec.digest)
    middle = reference(rounds.spec.digest, first, 1)
    second = rounds.soup(tmp_path, 0.5, middle["version_digest"])
    references = [middle, reference(middle["version_digest"], second, 2)]
    names, end = [r["sha256"] for r in references], references[1]["version_digest"]
    one = rounds.task(soups=references[:1], version_digest=middle["version_digest"], server_round=2)
    made_from = manifest_of(rounds.call(one, "m1", {names[0]: first})).base_digest
    assert made_from == middle["version_digest"]
    two = rounds.task(soups=references, version_digest=end, server_round=3)
    assert (
        manifest_of(rounds.call(two, "m2", {names[1]: second})).base_digest == end
    )  # the first is in the cache
    base = model_tensors(load_model(str(rounds.base)).model)
    held = models.global_model(str(rounds.base)).tensors
    assert all(torch.allclose(held[name], base[name] + 0.75, atol=1e-6) for name in base)


def test_between_rounds_only_the_tensors_of_the_version_are_held(rounds: Rounds) -> None:
    rounds.call(rounds.task(), "m1")
    held = models.global_model(str(rounds.base))
    assert held._model is None
    again = model_tensors(held.model)
    assert held._model is not None
    assert all(torch.equal(held.tensors[name], again[name]) for name in again)


def test_a_soup_of_another_lineage_is_refused(rounds: Rounds, tmp_path: Path) -> None:
    stray = rounds.soup(tmp_path, 0.25, "sha256:" + "9" * 64)
    soup = reference(rounds.spec.digest, stray, 1)
    task = rounds.task(soups=[soup], version_digest=soup["version_digest"], server_round=2)
    with pytest.raises(GymError) as caught:
        rounds.call(task, soups={soup["sha256"]: stray})
    assert caught.value.code is ErrorCode.BASE_MISMATCH
    assert "does not follow" not in caught.value.message, (
        "the chain is whole; the soup's own base is another one"
    )


@pytest.mark.parametrize("lie", ["round", "digest", "order"])
def test_a_chain_of_versions_that_does_not_recompute_is_refused_naming_the_version(
    rounds: Rounds, tmp_path: Path, lie: str
) -> None:
    first = reference(rounds.spec.digest, b"one", 1)
    second = reference(first["version_digest"], b"two", 2)
    if lie == "round":
        second["server_round"] = 3
    elif lie == "digest":
        second = reference("sha256:" + "9" * 64, b"two", 2)
    else:
        second = reference(first["version_digest"], b"two", 1)
    task = rounds.task(soups=[first, second], version_digest=second["version_digest"], server_round=4)
    with pytest.raises(GymError) as caught:
        rounds.call(task)
    assert caught.value.code is ErrorCode.BASE_MISMATCH
    assert f"version 2 of the task ({second['version_digest']}) does not follow" in caught.value.message


def test_a_soup_whose_bytes_are_not_its_name_is_refused(rounds: Rounds) -> None:
    soup = reference(rounds.spec.digest, b"other", 1)
    task = rounds.task(soups=[soup], version_digest=soup["version_digest"], server_round=2)
    with pytest.raises(GymError) as caught:
        rounds.call(task, soups={soup["sha256"]: b"abc"})
    assert caught.value.code is ErrorCode.HASH_MISMATCH


def test_another_base_than_the_federations_is_refused_with_the_remedy(rounds: Rounds) -> None:
    other = "sha256:" + "8" * 64
    assert "--base" in rounds.refused(
        ErrorCode.BASE_MISMATCH, rounds.task(base_digest=other, version_digest=other)
    )


def test_a_task_over_the_policy_is_refused_before_anything_is_loaded(rounds: Rounds) -> None:
    rounds.home.policy_path.write_text("max_steps: 3\n")
    assert "max_steps of 3" in rounds.refused(ErrorCode.POLICY_REFUSED, rounds.task(), model="/nowhere")


def test_an_update_over_the_limit_never_leaves(rounds: Rounds) -> None:
    rounds.home.policy_path.write_text("max_update_bytes: 100\n")
    assert "limit of 100" in rounds.refused(ErrorCode.TOO_LARGE, rounds.task())


def test_training_that_takes_too_long_is_refused_by_the_policy(rounds: Rounds) -> None:
    rounds.home.policy_path.write_text("max_seconds: 0.000001\n")
    assert "max_seconds" in rounds.refused(ErrorCode.POLICY_REFUSED, rounds.task())


def test_soups_after_the_policys_time_are_not_applied(rounds: Rounds, tmp_path: Path) -> None:
    rounds.home.policy_path.write_text("max_seconds: 0.000001\n")
    path = rounds.soup(tmp_path, 0.25, rounds.spec.digest)
    soup = reference(rounds.spec.digest, path, 1)
    task = rounds.task(soups=[soup], version_digest=soup["version_digest"], server_round=2)
    with pytest.raises(GymError, match="during the update to the global version") as refused:
        rounds.call(task, soups={soup["sha256"]: path})
    assert refused.value.code is ErrorCode.POLICY_REFUSED


def test_a_step_that_runs_past_the_policys_time_ends_at_its_next_module(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {"seconds": 0.0}
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late["seconds"]))
    rounds.data.write_text(rounds.data.read_text() * 64)
    recipe = {**RECIPE, "gradient_accumulation_steps": 256}
    phases: list[str] = []
    passes: list[str] = []

    def count(module: torch.nn.Module, *_: object) -> None:
        passes.extend([type(module).__name__] if isinstance(module, Qwen3ForCausalLM) else [])
        late["seconds"] = 1e6 if len(passes) >= 20 else 0.0

    counter = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        with hooks_set(Hooks(progress=lambda phase, *_: phases.append(phase))):
            reason = rounds.refused(ErrorCode.POLICY_REFUSED, rounds.task(recipe=recipe))
    finally:
        counter.remove()
    assert "max_seconds" in reason
    assert "during training" in reason
    assert "train" not in phases, "no step was completed"
    assert len(passes) < 40, "of the 256 passes of one step"


def test_a_backward_pass_ends_at_the_policys_time_and_other_threads_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = {"seconds": 0.0}
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late["seconds"]))
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    with ThreadPoolExecutor(1) as other, hooks.TimeLimit(Policy(), Hooks()).bounding_steps():
        loss = model(torch.ones(1, 2)).sum()
        late["seconds"] = 1e6
        with pytest.raises(GymError, match="max_seconds"):
            loss.backward()
        other.submit(lambda: model(torch.ones(1, 2)).sum().backward()).result()
        with pytest.raises(GymError, match="max_seconds"):
            model(torch.ones(1, 2))
    model(torch.ones(1, 2)).sum().backward()  # nothing is left behind


@pytest.mark.parametrize(
    ("changes", "phase", "named"),
    [
        ({"codec": {"codec": "ternary", "distill_steps": 6}}, "distill", "during distilling the scales"),
        ({}, "encode", "during encoding"),
        (
            {"recipe": {**RECIPE, "finetuning": "lora"}, "codec": {"factors": "int8"}},
            "encode",
            "during encoding",
        ),
    ],
)
def test_distillation_and_encoding_after_the_policys_time_are_refused(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], phase: str, named: str
) -> None:
    late = {"seconds": 0.0}
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late["seconds"])
    monkeypatch.setattr(hooks, "time", clock)
    seen: list[tuple[str, int]] = []

    def progress(at: str, done: int, total: int, loss: float | None) -> None:
        seen.append((at, done))
        if at == phase:
            late["seconds"] = 1e6

    with hooks_set(Hooks(progress=progress)):
        assert named in rounds.refused(ErrorCode.POLICY_REFUSED, rounds.task(**changes))
    assert ("encode", 1) not in seen
    assert len([one for one in seen if one[0] == "distill"]) <= 1


def test_lora_rounds_send_factors_and_leave_the_model_clean(rounds: Rounds, tmp_path: Path) -> None:
    recipe = {**RECIPE, "finetuning": "lora", "lora": {"r": 2}}
    reply = rounds.call(rounds.task(recipe=recipe))
    (tmp_path / "got").write_bytes(next(iter(reply["delta"].values())).data)
    with DeltaFile.open(tmp_path / "got", rounds.spec) as delta:
        assert {delta.record(name).codec for name in delta.names} == {"lora"}
    full = rounds.call(rounds.task(server_round=2), "m2")  # the same process trains fully next
    (tmp_path / "full").write_bytes(next(iter(full["delta"].values())).data)
    with DeltaFile.open(tmp_path / "full", rounds.spec) as delta:
        assert set(delta.names) == set(rounds.spec.shapes)


def test_in_stock_flower_what_is_returned_counts_so_the_residual_moves_on(rounds: Rounds) -> None:
    rounds.call(rounds.task())
    feedback = ErrorFeedback.load(rounds.home.residuals(SERVER) / "residual.safetensors", rounds.spec.digest)
    assert feedback.norm() > 0
    assert not rounds.home.task_folder("m1").exists()


def test_moments_are_kept_from_round_to_round_if_the_recipe_says_so(rounds: Rounds) -> None:
    kept = rounds.home.residuals(SERVER) / "moments.safetensors"
    rounds.call(rounds.task())
    assert not kept.exists()
    recipe = {**RECIPE, "keep_optimizer_state": True}
    for server_round, steps in ((2, 4), (3, 8)):
        rounds.call(rounds.task(recipe=recipe, server_round=server_round), f"m{server_round}")
        moments = Residuals(rounds.home, SERVER).moments(rounds.spec.digest)
        assert int(moments["step"]) == steps
        assert len(moments) == 1 + 2 * len(rounds.spec.shapes)


def test_moments_wait_for_the_verdict_and_go_with_the_residual(rounds: Rounds) -> None:
    recipe = {**RECIPE, "keep_optimizer_state": True}
    manifest = manifest_of(rounds.call(rounds.task(recipe=recipe), **{"by-reference": True}))
    residuals, folder = Residuals(rounds.home, SERVER), TaskFolder(rounds.home.task_folder("m1"))
    for verdict, kept in (("rejected", set()), ("merged", {"residual.safetensors", "moments.safetensors"})):
        moments, residual = folder.moments_path.read_bytes(), folder.residual_path.read_bytes()
        residuals.stage(folder.residual_path, manifest.digest, folder.moments_path)
        assert residuals.moments(rounds.spec.digest) == {}
        residuals.settle([{"update": manifest.digest, "verdict": verdict}])
        assert {path.name for path in residuals.folder.iterdir()} == kept
        folder.moments_path.write_bytes(moments)
        folder.residual_path.write_bytes(residual)
    residuals.accept(manifest.digest, 2)
    assert residuals.moments(rounds.spec.digest, [1, 3]) == {}, "its version was rolled back"


def test_moments_do_not_outlive_a_merged_round_without_them_and_the_residual_keeps_its_own_round(
    home: Home, tmp_path: Path
) -> None:
    residuals = Residuals(home, SERVER)

    def merged(server_round: int, *names: str) -> None:
        paths = [tmp_path / name for name in ("residual", "moments")]
        for path in paths:
            feedback = ErrorFeedback(path, "base", {})
            feedback.record("weight", torch.full((2,), float(server_round)))
            if path.name in names:
                feedback.stage(path)
        update = f"update{server_round}"
        residuals.stage(paths[0], update, paths[1])
        residuals.settle([{"update": update, "verdict": "merged", "server_round": server_round}])

    merged(1, "residual", "moments")
    merged(2, "moments")
    assert float(residuals.moments("base", [1, 2])["weight"][0]) == 2.0
    assert residuals.load("base", [1]).norm() > 0, "its round is 1, though the moments' is 2"
    merged(3, "residual")
    assert residuals.moments("base", [1, 2, 3]) == {}
    merged(4, "moments")
    merged(5)
    assert residuals.moments("base", [1, 2, 3, 4, 5]) == {}
    merged(6, "moments")
    for of_other_homes in ([{"update": "other", "verdict": "merged", "server_round": 7}], []):
        residuals.settle(of_other_homes)
        assert float(residuals.moments("base", [6, 7])["weight"][0]) == 6.0, "another home's merge"


def test_a_task_whose_moments_are_over_the_limit_is_refused_before_training(rounds: Rounds) -> None:
    rounds.home.policy_path.write_text("max_optimizer_state_bytes: 1000\n")
    with pytest.raises(
        GymError, match=r"size of kept moments in bytes.*max_optimizer_state_bytes"
    ) as refused:
        rounds.call(rounds.task(recipe={**RECIPE, "keep_optimizer_state": True}))
    assert refused.value.code is ErrorCode.POLICY_REFUSED


def test_under_the_agent_the_residual_waits_for_the_verdict(rounds: Rounds) -> None:
    manifest = manifest_of(rounds.call(rounds.task(), **{"by-reference": True}))
    committed = rounds.home.residuals(SERVER) / "residual.safetensors"
    residuals, folder = Residuals(rounds.home, SERVER), TaskFolder(rounds.home.task_folder("m1"))
    assert not committed.exists()
    residuals.stage(folder.residual_path, manifest.digest)
    assert residuals.settle([{"update": manifest.digest, "verdict": "admitted"}]) == {}
    assert residuals.staged() == [manifest.digest]
    assert residuals.settle([{"update": manifest.digest, "verdict": "merged"}]) == {manifest.digest: "merged"}
    assert committed.exists()


@pytest.mark.parametrize("verdict", ["rejected", "aborted", "refused"])
def test_the_residual_of_an_update_that_was_not_merged_is_dropped(
    home: Home, tmp_path: Path, verdict: str
) -> None:
    (tmp_path / "residual").write_bytes(b"x")
    residuals = Residuals(home, SERVER)
    residuals.stage(tmp_path / "residual", "a" * 64)
    residuals.settle([{"update": "a" * 64, "verdict": verdict}])
    assert list(residuals.folder.iterdir()) == []


def test_of_two_merged_updates_the_newest_residual_stays(home: Home, tmp_path: Path) -> None:
    residuals = Residuals(home, SERVER)
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
        residuals.stage(tmp_path / name, name)
    residuals.settle([{"update": "new", "verdict": "merged"}, {"update": "old", "verdict": "merged"}])
    assert [path.read_text() for path in residuals.folder.iterdir()] == ["new"]


def test_a_partition_fills_the_placeholders_of_a_simulation(
    rounds: Rounds, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "shard3.jsonl").write_bytes(data.read_bytes())
    places = {"home": str(tmp_path / "node{partition}"), "data": str(tmp_path / "shard{partition}.jsonl")}
    rounds.call(rounds.task(), **places, **{"partition-id": 3})
    assert (tmp_path / "node3" / "key.pem").exists()
    with pytest.raises(GymError, match="partition-id"):
        rounds.call(rounds.task(), **places)


def test_deltas_decode_to_what_training_changed(rounds: Rounds, tmp_path: Path) -> None:
    codec = {"codec": "dense", "dense_dtype": "float32", "error_feedback": False}
    reply = rounds.call(rounds.task(codec=codec))
    (tmp_path / "got").write_bytes(next(iter(reply["delta"].values())).data)
    model = load_model(str(rounds.base)).model
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    with DeltaFile.open(tmp_path / "got", rounds.spec) as delta:
        apply_delta(model, delta)
    assert any(not torch.equal(before[name], tensor) for name, tensor in model_tensors(model).items())
    held = models.global_model(str(rounds.base)).model
    assert all(torch.equal(before[name], tensor) for name, tensor in model_tensors(held).items())


def test_a_residual_of_a_version_that_was_gone_back_from_is_forgotten(home: Home, tmp_path: Path) -> None:
    residuals = Residuals(home, SERVER)
    feedback = residuals.load("base")
    feedback.record("weight", torch.ones(2))
    feedback.stage(tmp_path / "residual")
    residuals.stage(tmp_path / "residual", "update")
    residuals.settle([{"update": "update", "verdict": "merged", "server_round": 2}])
    assert residuals.load("base", [1, 2, 4]).norm() > 0
    assert residuals.load("base", [1, None]).norm() > 0, "a task of 0.1 names no rounds"
    assert residuals.load("base", [1, 4]).norm() == 0
    assert residuals.load("base", [1, 2]).norm() == 0, "for good"
