"""What a hub may not choose before anybody agreed, and the bytes that come down: terms, limits, receipts, totals."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from gym_client.agent.global_model import base_source, needs_a_look
from gym_client.agent.policy import Policy
from gym_client.cli.join import join
from gym_client.cli.join_options import JoinOptions
from gym_client.cli.terms_in_words import offer_lines
from gym_client.hub.traffic import Bytes, Traffic, total_of
from gym_client.identity.home import Home

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.agent_scene import Recorder, Scene
from tests.support.tiny_hub import TinyHub
from tests.unit.client.test_client_offer import an_offer
from tests.unit.client.test_client_waiting import Yes

ANNOUNCED = json.dumps(
    {
        "recipe": TrainingRecipe().model_dump(mode="json"),
        "codec": CodecPolicy().model_dump(mode="json"),
        "soup": {"form": "factors", "why": "\x1b[2J[/x]"},
    }
)
WATCHED = """
import os, sys
opened = []

def watch(event, args):
    if event in ("open", "os.listdir", "os.scandir") and args and isinstance(args[0], (str, bytes)):
        if os.path.realpath(os.fsdecode(args[0])).startswith(sys.argv[1]):
            opened.append((event, str(args[0])))

sys.addaudithook(watch)
from gym_client.identity.home import Home
from gym_client.cli.join import join
from gym_client.cli.join_options import JoinOptions
from tests.unit.client.test_client_waiting import Yes
from tests.support.agent_scene import Recorder
from gym_fed.core.errors import GymError
try:
    join(Home.open(sys.argv[2]), JoinOptions(server=sys.argv[3], fingerprint=sys.argv[4]), Yes(), Recorder())
except GymError as error:
    print(error.code.value, error.message)
print("opened", opened)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TinyHub]:
    hub = TinyHub(tmp_path / "hub").start()
    hub.announces = {"recipe_json": ANNOUNCED, "base_model": "gym-nano", "base_digest": "sha256:" + "0" * 64}
    yield hub
    hub.stop()


class No(Yes):
    """Declines what a test names, and keeps what it was asked."""

    def __init__(self, declines: str) -> None:
        self.declines, self.asked = declines, list[str]()

    def local_copy(self, name: str) -> bool:
        self.asked.append(f"copy {name}")
        return self.declines != "copy"

    def offer(self, offer: object) -> bool:
        self.asked.append("offer")
        return self.declines != "offer"


def refused(hub: TinyHub, home: Path, consent: Yes | None = None, **options: object) -> GymError:
    with pytest.raises(GymError) as caught:
        join(
            Home.open(home),
            JoinOptions(server=hub.address, fingerprint=hub.fingerprint, **options),  # type: ignore[arg-type]
            consent or Yes(),
            Recorder(),
        )
    return caught.value


NAMES = [
    "/etc/passwd",
    "../secret",
    "secret/model",
    "~/secret",
    "a..b",
    ".hidden",
    "",
    "C:\\x",
    "x" * 97,
    "a\nb",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_base_that_a_hub_names_by_a_path_is_refused(name: str) -> None:
    with pytest.raises(GymError, match="not a plain name") as caught:
        base_source(None, name)
    assert caught.value.code is ErrorCode.POLICY_REFUSED
    assert base_source("/srv/models/mine", name) == "/srv/models/mine"  # one's own path is one's own affair


def test_a_base_that_a_hub_names_like_a_folder_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    for name in ("models", "gone"):
        with pytest.raises(GymError, match="local file or folder has the same name"):
            base_source(None, name)
    assert base_source(None, "SmolLM2-135M") == "SmolLM2-135M"
    assert base_source(None, "gym-nano") == "gym-nano"
    assert not needs_a_look(None, "gym-nano")
    assert needs_a_look(None, "SmolLM2-135M")
    assert not needs_a_look("/srv/models/mine", "SmolLM2-135M")


@pytest.mark.parametrize("relative", [True, False])
def test_a_path_that_a_hub_names_is_not_opened_by_a_join(
    tmp_path: Path, hub: TinyHub, tiny_base: Path, relative: bool
) -> None:
    hub.announces["base_model"] = f"../{tiny_base.name}" if relative else str(tiny_base)
    work = tiny_base.parent / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tiny_base), str(tmp_path / "home"), hub.address, hub.fingerprint],
        capture_output=True,
        text=True,
        cwd=work,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("policy-refused the hub's base model is")
    assert "opened []" in done.stdout


def test_a_task_that_names_a_path_as_its_base_is_refused(tmp_path: Path, tiny_base: Path) -> None:
    from gym_client.agent.work import Setup, perform

    from gym_fed.config.hub.task import TaskSpec

    digest = "sha256:" + "0" * 64
    spec = TaskSpec(
        server="s0123456789abcdef",
        server_round=1,
        base_model=str(tiny_base),
        base_digest=digest,
        version_digest=digest,
        max_update_bytes=1,
        deadline_seconds=1,
    )
    with pytest.raises(GymError, match="not a plain name"):
        perform(spec, "m1", Home.open(tmp_path / "h"), Policy(), Setup(), lambda sha256: tmp_path)


def test_the_local_copy_of_a_base_that_only_the_hub_named_is_read_after_a_yes(
    tmp_path: Path, hub: TinyHub
) -> None:
    hub.announces["base_model"] = "no-such-model"
    no, yes = No("copy"), No("")
    assert refused(hub, tmp_path / "a", no).code is ErrorCode.PERMISSION_DENIED
    assert no.asked == ["copy no-such-model"]
    error = refused(hub, tmp_path / "b", yes)
    assert yes.asked == ["copy no-such-model"]
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert not hub.enrolled


@pytest.mark.parametrize("key", ["join_download_bytes", "round_download_bytes"])
def test_terms_over_max_download_bytes_are_refused_before_anything_is_loaded_or_enrolled(
    tmp_path: Path, hub: TinyHub, key: str
) -> None:
    home = Home.open(tmp_path / "home")
    home.policy_path.write_text("max_download_bytes: 1000000\n")
    hub.announces[key] = 1_000_001
    asked = No("")
    error = refused(hub, home.folder, asked)
    assert error.code is ErrorCode.POLICY_REFUSED
    assert "1,000,001" in error.message
    assert "max_download_bytes of 1,000,000" in error.message
    assert asked.asked == []
    assert not hub.enrolled
    hub.announces[key] = 1_000_000
    assert refused(hub, home.folder).code is ErrorCode.BASE_MISMATCH  # the limit itself is within it


@pytest.mark.parametrize(("options", "planned"), [({}, 10), ({"rounds": 2}, 10), ({"rounds": 2}, 0)])
def test_terms_over_the_total_of_all_rounds_are_refused(
    tmp_path: Path, hub: TinyHub, options: dict[str, int], planned: int
) -> None:
    home = Home.open(tmp_path / "home")
    rounds = min(filter(None, (options.get("rounds"), planned)))
    hub.announces |= {"join_download_bytes": 500, "round_download_bytes": 100, "num_rounds": planned}
    home.policy_path.write_text(f"max_total_download_bytes: {500 + rounds * 100 - 1}\n")
    error = refused(hub, home.folder, **options)
    assert error.code is ErrorCode.POLICY_REFUSED
    assert f"total download in bytes is {500 + rounds * 100}" in error.message
    home.policy_path.write_text(f"max_total_download_bytes: {500 + rounds * 100}\n")
    assert refused(hub, home.folder, **options).code is ErrorCode.BASE_MISMATCH


def test_a_run_that_fetches_more_than_its_total_refuses_the_task(scene: Scene) -> None:
    data = np.arange(1000, dtype=np.float32)  # 4 kB; two of three tasks are within 10 kB
    for number in range(3):
        scene.hub.give(scene.task(f"m{number}", RecordDict({"arrays": ArrayRecord([data + number])})))
    scene.hub.finish()
    policy = Policy(max_total_download_bytes=10_000)
    scene.agent(lambda message, context: RecordDict(), policy).run()
    assert "max_total_download_bytes" in scene.error_of("m2").reason
    assert not scene.hub.submitted["m1"].HasField("error")


def test_the_terms_say_bytes_down_as_well_as_up() -> None:
    offer = an_offer(
        update_bytes=4_900_000,
        join_download_bytes=20_000_000,
        round_download_bytes=9_800_000,
        soup_form="factors",
        rounds=10,
    )
    lines = dict(offer_lines(offer))
    total, parts = "118.0 MB in 10 rounds, 49.0 MB up", "9.8 MB a round (LoRA factors), 20.0 MB to join"
    assert lines["download"] == f"{total}; {parts}"
    terms = offer.to_dict()
    assert (terms["join_download_bytes"], terms["round_download_bytes"]) == (20_000_000, 9_800_000)


def test_a_hub_that_says_nothing_of_its_soups_is_shown_by_its_sizes_alone() -> None:
    assert ("download", "10 B a round") in offer_lines(an_offer(round_download_bytes=10))


def test_bytes_down_and_up_are_counted_shown_kept_with_the_receipt_and_totalled(scene: Scene) -> None:
    weights = np.arange(50_000, dtype=np.float32)

    def double(message: Message, context: Context) -> RecordDict:
        return RecordDict({"arrays": ArrayRecord([2 * message.content["arrays"].to_numpy_ndarrays()[0]])})

    for number in range(2):
        scene.hub.give(scene.task(f"m{number}", RecordDict({"arrays": ArrayRecord([weights + number])})))
    scene.agent(double).run(max_rounds=2)
    receipts = scene.home.receipts()
    assert len(receipts) == 2
    for receipt in receipts:
        assert 200_000 < receipt["bytes_down"] < 201_000
        assert 200_000 < receipt["bytes_up"] < 201_000
    assert scene.display.texts("traffic") == ["this task: 200.1 kB down, 200.1 kB up"] * 2
    total = total_of(scene.home, scene.hub.server)
    assert total == Bytes(*(sum(r[key] for r in receipts) for key in ("bytes_down", "bytes_up")))
    assert total_of(scene.home, "s" + "0" * 16) == Bytes()


def test_bytes_of_a_download_that_breaks_off_count_once(scene: Scene) -> None:
    data = np.arange(1_000_000, dtype=np.float32)
    scene.hub.break_download_after = 2 << 20
    scene.hub.give(scene.task("m1", RecordDict({"arrays": ArrayRecord([data])})))
    scene.agent(lambda message, context: RecordDict()).run(max_rounds=1)
    size = sum(len(o) for o in scene.hub.objects.values())
    assert scene.hub.download_offsets[-1] > 0
    assert total_of(scene.home, scene.hub.server).down == size


def test_totals_survive_and_a_torn_file_is_named(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    for _ in range(2):
        traffic = Traffic(home, "s1")
        traffic.count_down(10)
        traffic.count_up(3)
        traffic.save()
        traffic.save()
    assert total_of(home, "s1") == Bytes(20, 6)
    (tmp_path / "traffic.json").write_text('{"s1": {"down": ')
    with pytest.raises(GymError, match=r"traffic\.json") as caught:
        total_of(home, "s1")
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_receipt_that_is_fetched_again_is_kept_once_whatever_was_counted(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    home.append_receipt({"update": "a", "bytes_down": 5, "bytes_up": 1})
    home.append_receipt({"update": "a", "bytes_down": 0, "bytes_up": 0})
    home.append_receipt({"update": "b", "bytes_down": 0, "bytes_up": 0})
    assert [r["update"] for r in home.receipts()] == ["a", "b"]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x1c", "\r"])
def test_a_receipt_with_any_line_separator_is_kept_once_and_read_again(home: Home, separator: str) -> None:
    receipt = {"update": "a", "reason": f"one{separator}two"}
    for _ in range(2):
        home.append_receipt({**receipt, "bytes_down": 5})
    assert [{**each, "bytes_down": 5} for each in home.receipts()] == [{**receipt, "bytes_down": 5}]


def test_soups_that_an_account_has_here_are_not_to_be_fetched_to_join(scene: Scene) -> None:
    from gym_client.agent.kept_soups import KeptSoups
    from gym_client.cli.announced import bytes_to_join

    from gym_fed.trust.wire.v1 import hub_pb2 as pb

    for server, soup in ((scene.client.pin.server, b"soup"), ("another", b"soup of another hub")):
        (scene.home.objects / (name := hashlib.sha256(soup).hexdigest())).write_bytes(soup)
        KeptSoups(scene.home).replace(server, [name])
    status = pb.StatusReply(join_download_bytes=10)
    assert bytes_to_join(scene.client, status) == 6
    scene.client.forget_enrolment()
    assert bytes_to_join(scene.client, status) == 6  # left, but the soups are still here


@pytest.mark.parametrize(
    ("rounds", "text"),
    [
        (None, "on cpu; rounds until you stop"),
        (1, "on cpu; 1 round or until you stop"),
        (6, "on cpu; 6 rounds or until you stop"),
    ],
)
def test_the_terms_say_how_many_rounds_are_to_come(rounds: int | None, text: str) -> None:
    assert text in dict(offer_lines(an_offer(rounds=rounds)))["runs here"]
