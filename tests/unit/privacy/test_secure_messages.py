"""Secure rounds with real contributors in one process: the soup is the sum of the votes of those who stay."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gym_client.app
import gym_client.privacy.secure_round
import gym_server.privacy.secure_round
import numpy as np
import pytest
import torch
import yaml
from flwr.app import ConfigRecord
from gym_client.agent.policy import Policy
from gym_client.agent.tasks import FinishedUpdate, TaskFolder, Trained
from gym_client.agent.work import Setup, perform
from gym_client.identity.home import Home
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.privacy.secure_stages import Stages
from gym_server.rounds.payload import Inline
from gym_server.rounds.replay import replay
from gym_server.strategy.durable import DurableDeltaSoup

from gym_fed.base.models import load_model
from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.server import CONFIG_NAME
from gym_fed.config.hub.task import TaskSpec, next_digest
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import encode_delta
from gym_fed.delta.file import DeltaFile
from gym_fed.privacy.secure_aggregation.messages import RECORD, UNMASK, Advert, SignedAdvert
from gym_fed.privacy.secure_aggregation.votes import MAGIC, signs
from gym_fed.trust.identity.keys import SigningKey
from tests.support.local_grid import Killed, LocalGrid
from tests.support.private_configs import NOTHING_COMPARED
from tests.support.quick import quick

NAMES = ["ann", "bob", "cyd", "dan"]
STEP_NORM = 1.0
CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": 1, "min_contributors": 3, "deadline_seconds": 60},
    "recipe": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 32},
    "secure_aggregation": {"threshold": 3, "begin_with": 3, "stage_seconds": 30, "step_norm": STEP_NORM},
    "soup": {
        "aggregator": "mean",
        "codec": {"codec": "dense", "dense_dtype": "float32", "error_feedback": False},
    },
    "codec": {"error_feedback": False},
    **NOTHING_COMPARED,
}


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gym_server.privacy.secure_round, "POLL_SECONDS", 0.01)
    folder = tmp_path / "hub"
    init_hub(folder, HubChoices(str(tiny_base), "test", "open"))
    config = {"name": "test", "base_model": str(tiny_base), "enrolment": {"policy": "open"}, **CONFIG}
    (folder / CONFIG_NAME).write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def grid(tmp_path: Path, tiny_base: Path) -> LocalGrid:
    return LocalGrid(tmp_path, tiny_base, NAMES)


def run(hub: Path, grid: LocalGrid, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """A whole run; the one round as the hub reports it."""
    with Federation.open(hub) as fed:
        DurableDeltaSoup(fed, should_stop=stop).start(grid.serve(fed))
        return fed.round_store.history()[-1]


def plain_votes(fed: Federation, grid: LocalGrid, name: str, folder: Path) -> dict[str, np.ndarray]:
    """What a contributor votes, from its update in the clear: the same task without secure aggregation."""
    current = fed.round_store.current()
    assert current is not None
    assert current.spec is not None
    spec = TaskSpec.model_validate({**current.spec.model_dump(), "secure_aggregation": None})
    setup = Setup(data=grid.data(name), model=str(grid.base))
    home = Home.open(str(folder / f"plain-{name}"))
    finished = perform(spec, "task", home, Policy(), setup, lambda sha256: folder / sha256)
    base = BaseSpec(fed.base.model_name, spec.version_digest, fed.base.shapes)
    with DeltaFile.open(finished.delta_path, base) as delta:
        return {tensor: signs(delta, tensor, base).astype(np.int64) for tensor in base.shapes}


def assert_sum_of(
    fed: Federation, grid: LocalGrid, names: list[str], folder: Path, votes_of: Callable[..., Any]
) -> None:
    """The soup is these contributors' votes, bit for bit, and comes out of a replay again."""
    votes = [votes_of(fed, grid, name, folder) for name in names]
    step = STEP_NORM / np.sqrt(fed.base.num_parameters) / len(names)
    soup = fed.round_store.soups()[-1]
    with DeltaFile.open(fed.store.local_path(soup.sha256), fed.base) as found:
        for tensor, shape in fed.base.shapes.items():
            total = sum(vote[tensor] for vote in votes)
            want = torch.from_numpy((total * step).astype(np.float32)).reshape(shape)
            assert torch.equal(found.decode(tensor), want), tensor
    replayed = replay(fed.state, 1)
    assert replayed["soup"] == replayed["replayed"] == soup.sha256


def test_the_soup_is_the_sum_of_the_votes_of_who_stayed_and_no_update_reaches_the_hub(
    hub: Path, grid: LocalGrid, tmp_path: Path
) -> None:
    """Dan goes after it has shared its keys: its masks are taken off with the key that the others give back."""

    def leave(name: str, message: Any) -> None:
        if name == "dan" and message.metadata.message_type == "train":
            grid.gone.add("dan")
            raise Killed

    grid.before = leave
    assert run(hub, grid)["verdicts"] == {"merged": 3}
    with Federation.open(hub) as fed:
        assert_sum_of(fed, grid, NAMES[:3], tmp_path, plain_votes)
        masked = [path for path in (hub / "objects").rglob("*") if path.is_file()]
        kept = [path for path in masked if path.name != fed.round_store.soups()[-1].sha256]
        assert len(kept) == 3
        assert all(path.read_bytes().startswith(MAGIC) for path in kept)
        entries = [entry.body for entry in fed.ledger.entries() if entry.kind == "version"]
        assert entries[0]["secure_aggregation"] == {
            "voters": 3,
            "threshold": 3,
            "bits": 4,
            "step_norm": STEP_NORM,
        }
    for name in NAMES:
        states = list(grid.homes[name].folder.glob("secure/*/state.json"))
        assert [stat.S_IMODE(path.stat().st_mode) for path in states] == [0o600]
        for path in grid.homes[name].tasks.glob("*/finished.json"):
            manifest = json.loads(path.read_text())["manifest"]
            assert (manifest["metrics"], manifest["num_examples"]) == ({}, 1)


# ---- the same with updates that nobody trained ----


def drawn(base: dict[str, tuple[int, ...]], name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(NAMES.index(name))
    return {tensor: torch.randn(shape, generator=generator) for tensor, shape in sorted(base.items())}


def drawn_votes(fed: Federation, grid: LocalGrid, name: str, folder: Path) -> dict[str, np.ndarray]:
    found = drawn(fed.base.shapes, name)
    return {tensor: value.sign().numpy().astype(np.int64).reshape(-1) for tensor, value in found.items()}


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch, tiny_base: Path) -> None:
    """Updates with signs that are drawn instead of learnt."""
    base = {name: tensor.detach() for name, tensor in load_model(str(tiny_base)).model.named_parameters()}

    def draw(spec: TaskSpec, message_id: str, home: Home, *_: Any) -> FinishedUpdate:
        folder = TaskFolder(home.task_folder(message_id))
        folder.begin(spec, {})
        done = folder.renewed(spec, home.key, time.time())
        if done is not None:
            return done
        shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
        tuned = {name: base[name] + value for name, value in drawn(shapes, home.folder.name).items()}
        version = BaseSpec("base", spec.version_digest, shapes)
        policy = CodecPolicy(error_feedback=False)
        report = encode_delta(tuned, base, policy, folder.delta_path, version)
        trained = Trained(report.sha256, report.size_bytes, 7, {"train_loss": 1.0})
        trained = gym_client.privacy.secure_round.SecureRound(home, spec, home.key).mask(
            folder, trained, version, "it"
        )
        return folder.finish(spec, trained, home.key, time.time())

    monkeypatch.setattr(gym_client.app, "perform", draw)


@pytest.mark.slow  # a start of both sides for every stage
@pytest.mark.usefixtures("untrained")
def test_a_round_survives_kills_of_the_hub_and_of_a_contributor_at_every_stage(
    hub: Path, grid: LocalGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []

    def kill_once(name: str) -> None:
        if name not in killed:
            killed.append(name)
            raise Killed

    monkeypatch.setattr(gym_server.privacy.secure_round, "failpoint", kill_once)
    monkeypatch.setattr(gym_client.privacy.secure_round, "failpoint", kill_once)
    for start in range(10):
        with Federation.open(hub) as fed:
            try:
                DurableDeltaSoup(fed).start(grid.serve(fed, newcomers=start == 0))
                break
            except Killed:
                continue
    stages = [
        "secure-share",
        "secure-train",
        "state-merging",
        "secure-confirm",
        "secure-unmask",
        "secure-unmasked",
    ]
    assert [name for name in killed if not name.startswith("client")] == stages
    lines = ["client-secure-" + line for line in ("advertised", "shared", "masked", "confirmed", "unmasking")]
    assert [name for name in killed if name.startswith("client")] == lines
    with Federation.open(hub) as fed:
        assert fed.round_store.history()[-1]["verdicts"] == {"merged": 4}
        assert_sum_of(fed, grid, NAMES, tmp_path, drawn_votes)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("stage", "merged"),
    [("query.share_keys", NAMES[:3]), ("query.confirm", NAMES), ("query.unmask", NAMES)],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_who_goes_for_good_at_any_stage_does_not_end_the_round(
    hub: Path, grid: LocalGrid, tmp_path: Path, stage: str, merged: list[str]
) -> None:
    def leave(name: str, message: Any) -> None:
        if name == "dan" and message.metadata.message_type == stage:
            grid.gone.add("dan")
            raise Killed

    grid.before = leave
    assert run(hub, grid)["verdicts"] == {"merged": len(merged)}
    with Federation.open(hub) as fed:
        assert_sum_of(fed, grid, merged, tmp_path, drawn_votes)


@pytest.mark.usefixtures("untrained")
def test_below_the_threshold_the_round_ends_with_its_reason_and_nobody_is_asked_to_unmask(
    hub: Path, grid: LocalGrid
) -> None:
    def leave(name: str, message: Any) -> None:
        if name in ("cyd", "dan") and message.metadata.message_type == "train":
            grid.gone.add(name)
            raise Killed

    grid.before = leave
    config = yaml.safe_load((hub / CONFIG_NAME).read_text())
    config["rounds"]["deadline_seconds"] = 1.5
    (hub / CONFIG_NAME).write_text(yaml.safe_dump(config))
    with Federation.open(hub) as fed:
        DurableDeltaSoup(fed, should_stop=lambda: _state(fed) == "aborted").start(grid.serve(fed))
        ended = fed.round_store.history()[0]
    assert "only 2 masked updates at the deadline; 3 are needed, and nothing was unmasked" in ended["reason"]
    assert ended["verdicts"] == {"aborted": 2}
    assert not {"query.confirm", "query.unmask"} & {kind for _, kind in grid.heard}


def _state(fed: Federation) -> str:
    current = fed.round_store.current()
    return current.state if current else ""


@pytest.mark.usefixtures("untrained")
def test_with_privacy_the_sum_is_noised_and_charged_and_no_digest_of_it_is_published(
    hub: Path, grid: LocalGrid, tmp_path: Path
) -> None:
    config = yaml.safe_load((hub / CONFIG_NAME).read_text())
    del config["secure_aggregation"]["step_norm"]
    config["privacy"] = {"mechanism": "discrete_gaussian", "noise_multiplier": 2.0, "epsilon": 50.0}
    (hub / CONFIG_NAME).write_text(yaml.safe_dump(config))
    assert run(hub, grid)["verdicts"] == {"merged": 4}
    with Federation.open(hub) as fed:
        votes = [drawn_votes(fed, grid, name, tmp_path) for name in NAMES]
        size = fed.base.num_parameters
        unit = 1.0 / np.sqrt(size) / len(NAMES)  # privacy.clipping_norm stands for a vote vector
        soup = fed.round_store.soups()[-1]
        with DeltaFile.open(fed.store.local_path(soup.sha256), fed.base) as found:
            noise = np.concatenate(
                [
                    np.rint(found.decode(name).numpy().astype(np.float64).reshape(-1) / unit)
                    - sum(vote[name] for vote in votes)
                    for name in fed.base.shapes
                ]
            )
        assert abs(noise.std() / (2.0 * np.sqrt(size)) - 1) < 0.1
        entries = [entry for entry in fed.ledger.entries() if entry.kind in ("version", "privacy")]
        assert [entry.kind for entry in entries].count("privacy") == 1
        version = next(entry.body for entry in entries if entry.kind == "version")
        assert version["secure_aggregation"].keys() == {"voters", "threshold", "bits", "step_norm"}
        assert replay(fed.state, 1)["replayed"] == soup.sha256


def test_on_stock_flower_it_is_refused(hub: Path) -> None:
    with Federation.open(hub) as fed, pytest.raises(GymError, match="stock Flower") as refused:
        DurableDeltaSoup(fed, Inline(fed.store, 1 << 20))
    assert refused.value.code is ErrorCode.CONFIG_INVALID


def altered(name: str, spec: dict[str, Any], at: str, only: list[str]) -> dict[str, Any]:
    """What a malicious hub gives one contributor in the place of the round's task."""
    if name not in only:
        return spec
    if at == "version":
        sha256 = str(NAMES.index(name)) * 64
        digest = next_digest(spec["base_digest"], sha256, 1)
        soup = {"sha256": sha256, "size_bytes": 9, "version_digest": digest, "server_round": 1}
        return {**spec, "soups": [soup], "version_digest": digest}
    return {**spec, "recipe": {**spec["recipe"], "learning_rate": 0.1 * (1 + NAMES.index(name))}}


def second_round(fed: Federation, grid: LocalGrid) -> dict[str, Any]:
    """Run the second round to its abort: only then can a task have versions that follow from the base."""
    fed.round_store.open_next()
    fed.round_store.abort(1, "nobody came")
    DurableDeltaSoup(
        fed, should_stop=lambda: [r["state"] for r in fed.round_store.history()] == ["aborted"] * 2
    ).start(grid.serve(fed))
    return fed.round_store.history()[1]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("differs", quick(["learning rate", "version"], "learning rate"))
@pytest.mark.parametrize(
    "since", quick(["query.advertise_keys", "query.share_keys", "train", "query.confirm"], "query.confirm")
)
def test_a_hub_that_gives_contributors_different_tasks_learns_no_votes(
    hub: Path, grid: LocalGrid, monkeypatch: pytest.MonkeyPatch, since: str, differs: str
) -> None:
    """From the stage on that is named every contributor gets a task of its own; nobody reveals anything any more."""
    kinds = ["query.advertise_keys", "query.share_keys", "train", "query.confirm", "query.unmask"]
    answered: list[str] = []

    def cheat(name: str, message: Any) -> None:
        kind = message.metadata.message_type
        if kinds.index(kind) >= kinds.index(since):
            spec = json.loads(message.content["task"]["spec"])
            spec_json = json.dumps(altered(name, spec, differs, NAMES))
            message.content["task"] = ConfigRecord({"spec": spec_json})

    grid.before = cheat
    grid.after = lambda name, reply: answered.append(reply.metadata.message_type)
    # The hub is in on it: it takes adverts of whatever task it gave.
    monkeypatch.setattr(gym_server.privacy.secure_round, "check_tasks", lambda participants, task: None)
    config = yaml.safe_load((hub / CONFIG_NAME).read_text())
    config["rounds"]["deadline_seconds"] = 20
    (hub / CONFIG_NAME).write_text(yaml.safe_dump(config))
    with Federation.open(hub) as fed:
        ended = second_round(fed, grid)
        assert fed.round_store.num_committed() == 0
    assert ended["state"] == "aborted"
    assert "4 participants report that they received different tasks" in ended["reason"]
    late = kinds[max(1, kinds.index(since)) :]
    assert not {*answered} & {*late}, "an answer that holds a share, votes or a confirmation"


@pytest.mark.usefixtures("untrained")
def test_a_hub_that_gives_one_contributor_another_task_and_hides_its_keys_gains_nothing(
    hub: Path, grid: LocalGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dan alone trains another version: the three others name dan, and no masked votes are sent by anybody."""
    messages: list[str] = []

    def cheat(name: str, message: Any) -> None:
        spec = json.loads(message.content["task"]["spec"])
        message.content["task"] = ConfigRecord({"spec": json.dumps(altered(name, spec, "version", ["dan"]))})

    grid.before = cheat
    monkeypatch.setattr(gym_server.privacy.secure_round, "check_tasks", lambda participants, task: None)
    monkeypatch.setattr(
        gym_server.privacy.secure_round.log, "info", lambda text, *values: messages.append(text % values)
    )
    with Federation.open(hub) as fed:
        second_round(fed, grid)
        dan = grid.homes["dan"].key.contributor
    assert not {"train", "query.confirm", "query.unmask"} & {kind for _, kind in grid.heard}
    assert sum(f"the hub gave {dan} a different task" in message for message in messages) == 3


@pytest.mark.usefixtures("untrained")
def test_a_contributor_of_another_task_is_left_out_by_an_honest_hub(hub: Path, grid: LocalGrid) -> None:
    """A release that reads the task differently costs itself the round, and nobody else."""

    def misread(name: str, reply: Any) -> None:
        answer = json.loads(reply.content[RECORD]["json"]) if RECORD in reply.content else {}
        if name == "dan" and "advert" in answer:
            advert = Advert.model_validate({**answer["advert"], "task": "0" * 64})
            signed = SignedAdvert.sign(advert, grid.homes["dan"].key)
            reply.content[RECORD] = ConfigRecord({"json": signed.model_dump_json()})

    grid.after = misread
    assert run(hub, grid)["verdicts"] == {"merged": 3}
    assert ("dan", "query.share_keys") not in grid.heard


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("which", quick(["mask_key", "cipher_key"], "cipher_key"))
def test_a_key_with_which_nobody_has_a_secret_costs_its_owner_the_round_and_nobody_else(
    hub: Path, grid: LocalGrid, which: str
) -> None:
    """All would fail who are given such a key, round after round."""

    def lie(name: str, reply: Any) -> None:
        answer = json.loads(reply.content[RECORD]["json"]) if RECORD in reply.content else {}
        if name == "dan" and "advert" in answer:
            advert = Advert.model_validate({**answer["advert"], which: "01" + "00" * 31})  # of order 1
            signed = SignedAdvert.sign(advert, grid.homes["dan"].key)
            reply.content[RECORD] = ConfigRecord({"json": signed.model_dump_json()})

    grid.after = lie
    assert run(hub, grid)["verdicts"] == {"merged": 3}
    assert ("dan", "query.share_keys") not in grid.heard


@pytest.mark.usefixtures("untrained")
def test_false_shares_and_keys_of_another_are_passed_over(hub: Path, grid: LocalGrid, tmp_path: Path) -> None:
    """Ann reveals shares that nobody gave her; dan advertises with a key that is not its account's."""

    def lie(name: str, reply: Any) -> None:
        answer = json.loads(reply.content[RECORD]["json"]) if RECORD in reply.content else {}
        if name == "ann" and "seeds" in answer:
            answer["seeds"] = {other: share[:-2] + "00" for other, share in answer["seeds"].items()}
        elif name == "dan" and "advert" in answer:
            advert = Advert.model_validate({**answer["advert"], "public_key": stranger.public_key.hex()})
            answer = SignedAdvert.sign(advert, stranger).model_dump(mode="json")
        if answer:
            reply.content[RECORD] = ConfigRecord({"json": json.dumps(answer)})

    stranger, grid.after = SigningKey.generate(), lie
    config = yaml.safe_load((hub / CONFIG_NAME).read_text())
    config["secure_aggregation"]["threshold"] = 2
    config["rounds"]["min_contributors"] = 2
    (hub / CONFIG_NAME).write_text(yaml.safe_dump(config))
    assert run(hub, grid)["verdicts"] == {"merged": 3}
    assert ("dan", "query.share_keys") not in grid.heard
    with Federation.open(hub) as fed:
        answers = [outcome for _, outcome in Stages(fed.database).tasks(1, UNMASK).values()]
        assert sorted(answers) == ["failed", "replied", "replied"]  # ann's is no answer
        assert_sum_of(fed, grid, NAMES[:3], tmp_path, drawn_votes)
