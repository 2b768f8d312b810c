"""The files of deploy/: what they name exists, their configs are valid, and the manifests match Kubernetes' schemas."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.serving import ServingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.version import __version__

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
OVERLAYS = sorted(path.parent for path in DEPLOY.glob("k8s/overlays/*/kustomization.yaml"))
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
OURS = {"hub", "api", "client", "webui"}
BY_HAND = {"hub-passphrase", "api-keys", "hub-stores"}
"""Secrets that docs/deploy.md creates."""
OF_MONITORING = {"../prometheus", "../grafana/provisioning", "../grafana/dashboards"}


def documents(overlay: Path) -> list[dict[str, Any]]:
    """Every resource of an overlay, as kustomize builds it."""
    tool = next(
        (words for words in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(words[0])),
        None,
    )
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*tool, str(overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def pods(found: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in found:
        if (template := one.get("spec", {}).get("template")) is not None:
            yield f"{one['kind']} {one['metadata']['name']}", template["spec"]


# ---- Kubernetes ----


def test_there_are_the_four_overlays() -> None:
    assert {path.name for path in OVERLAYS} == {"sqlite", "postgres-s3", "gpu", "demo"}


@pytest.mark.parametrize(
    "file", sorted(DEPLOY.glob("k8s/**/kustomization.yaml")), ids=lambda p: p.parent.name
)
def test_what_a_kustomization_names_exists(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    named = [
        *values.get("resources", []),
        *(one["path"] for one in values.get("patches", []) if "path" in one),
    ]
    for generator in ("configMapGenerator", "secretGenerator"):
        named += [name for one in values.get(generator, []) for name in one.get("files", [])]
    assert [name for name in named if not (file.parent / name).exists()] == []
    listed = {name for name in named if not name.startswith("..")} | {"kustomization.yaml"}
    assert {path.name for path in file.parent.iterdir()} == listed, (
        "a file that no kustomization names is dead"
    )


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_the_manifests_match_the_schemas_of_kubernetes(overlay: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for one in documents(overlay):
        validate.validate(one, validate.latest_version(), strict=True)  # raises for an unknown kind, too


def test_a_kind_that_the_validator_does_not_know_fails() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    unknown = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"}}
    with pytest.raises(validate.SchemaNotFoundError):
        validate.validate(unknown, validate.latest_version(), strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_container_is_restricted_and_bounded(overlay: Path) -> None:
    found = list(pods(documents(overlay)))
    assert found
    for name, pod in found:
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 10001, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert {"cpu", "memory"} <= {*container["resources"]["requests"]} | {"cpu"}, name
            assert "memory" in container["resources"]["limits"], name
            mounted = {one["mountPath"]: one for one in container["volumeMounts"]}
            assert {"/data", "/tmp"} <= {*mounted}, name
            for path in {*mounted} - {"/data", "/tmp"}:
                assert mounted[path]["readOnly"] is True, (name, path)
            for kind, probe in container.items():
                if kind.endswith("Probe"):
                    assert "health" in probe["exec"]["command"], (name, kind)
                    assert probe["timeoutSeconds"] > 1, (name, kind)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_references_between_resources_resolve(overlay: Path) -> None:
    found = documents(overlay)
    names = {(one["kind"], one["metadata"]["name"]) for one in found}
    assert {one["metadata"].get("namespace") for one in found if one["kind"] != "Namespace"} == {"gym-fed"}
    for name, pod in pods(found):
        volumes = {one["name"] for one in pod.get("volumes", [])}
        for volume in pod.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names, name
            if "secret" in volume:
                secret = volume["secret"]["secretName"]
                assert secret in BY_HAND or ("Secret", secret) in names, (name, secret)
        claims = {
            claim["metadata"]["name"]
            for one in found
            for claim in one.get("spec", {}).get("volumeClaimTemplates", [])
        }
        for container in pod["containers"]:
            assert {one["name"] for one in container["volumeMounts"]} <= volumes | claims, name
            assert re.fullmatch(rf".+/gym-fed-\w+:{re.escape(__version__)}(-cuda)?", container["image"]), name
    for one in found:
        if one["kind"] == "HorizontalPodAutoscaler":
            target = one["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in names
            (metric,) = one["spec"]["metrics"]
            metrics = (ROOT / "gym_fed" / "serving" / "http" / "metrics.py").read_text()
            assert metric["pods"]["metric"]["name"] == "gym_engine_queued"
            assert '"gym_engine_queued"' in metrics


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_ports_of_services_policies_and_containers_agree(overlay: Path) -> None:
    found = documents(overlay)
    ports = {
        port["name"]: port["containerPort"]
        for _, pod in pods(found)
        for container in pod["containers"]
        for port in container.get("ports", [])
    }
    assert ports == {"grpc-tls": 9443, "dashboard": 9444, "http": 8000}
    for one in found:
        if one["kind"] == "Service":
            assert all(port["targetPort"] in ports for port in one["spec"].get("ports", [])), one["metadata"][
                "name"
            ]
        if one["kind"] == "NetworkPolicy":
            opened = {port["port"] for rule in one["spec"].get("ingress", []) for port in rule["ports"]}
            assert opened <= {*ports.values()}, one["metadata"]["name"]


# ---- configs ----


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("**/gym-server.yaml")), ids=lambda path: path.parent.name)
def test_the_configs_of_hubs_are_valid_and_reachable(file: Path) -> None:
    config = load_config(file, ServerConfig)
    assert (config.listen, config.advertise is not None) == ("0.0.0.0:9443", True)
    assert config.dashboard is not None
    assert config.dashboard.listen == "0.0.0.0:9444"
    assert not config.dashboard.public


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("**/serving.yaml")), ids=lambda path: path.parent.name)
def test_the_configs_of_servers_are_valid_and_need_keys(file: Path) -> None:
    config = load_config(file, ServingConfig)
    assert (config.host, config.port, config.api_keys is not None) == ("0.0.0.0", 8000, True)


# ---- Compose ----


def test_what_compose_names_exists() -> None:
    folder = DEPLOY / "compose"
    sources = {
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", [])
    }
    files = {name for name in sources if name.startswith(".")}
    assert [name for name in files - OF_MONITORING if not (folder / name).exists()] == []
    assert sources - files == set(COMPOSE["volumes"])
    for name, service in COMPOSE["services"].items():
        assert {*service.get("secrets", [])} <= {*COMPOSE["secrets"]}, name
        assert {*service.get("networks", [])} <= {*COMPOSE["networks"]}, name
        assert {*service.get("depends_on", {})} <= {*COMPOSE["services"]}, name
        if "build" in service:
            assert (folder / service["build"]["context"]).resolve() == ROOT
            assert f" AS {service['build']['target']}\n" in DOCKERFILE


def test_compose_keeps_its_secrets_in_files(tmp_path: Path) -> None:
    for name, service in COMPOSE["services"].items():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASS|SECRET|KEY", variable):
                assert re.search("_FILE$", variable), (name, variable)
                assert value.startswith(("/run/secrets/", "/metrics/")), (name, variable)
    shutil.copy(DEPLOY / "compose" / "secrets.sh", tmp_path)
    for _ in range(2):
        subprocess.run(["sh", str(tmp_path / "secrets.sh")], check=True)
        made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
        assert {f"secrets/{name}" for name in made} == {one["file"] for one in COMPOSE["secrets"].values()}
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert len(made["hub-passphrase"]) >= 24
    access = yaml.safe_load(made["s3.json"])["identities"][0]["credentials"][0]
    assert access == {"accessKey": made["s3-access-key"], "secretKey": made["s3-secret-key"]}


def test_our_services_in_compose_are_read_only_and_bounded() -> None:
    ours = {name: one for name, one in COMPOSE["services"].items() if one["image"].startswith("gym-fed-")}
    assert {*ours} == {"hub", "api"}
    for name, service in ours.items():
        assert service["image"].endswith(f":${{GYM_VERSION:-{__version__}}}"), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "mem_limit" in service, name


def test_no_writable_volume_is_shared_and_prometheus_reads_the_keys_where_they_are_written() -> None:
    writers: dict[str, list[str]] = {}
    mounts: dict[str, dict[str, str]] = {}
    for name, service in COMPOSE["services"].items():
        for source, place, *mode in (volume.split(":") for volume in service.get("volumes", [])):
            mounts.setdefault(name, {})[place] = source
            if (
                mode != ["ro"] and service.get("network_mode") != "none"
            ):  # one that ends before the others start
                writers.setdefault(source, []).append(name)
    assert {source: names for source, names in writers.items() if len(names) > 1} == {}
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    read = {
        job["job_name"].removeprefix("gym-"): Path(job["authorization"]["credentials_file"]) for job in jobs
    }
    assert {*read} == {"hub", "api"}
    for name, file in read.items():
        written = Path(COMPOSE["services"][name]["environment"]["GYM_METRICS_KEY_FILE"])
        assert file.name == written.name
        assert mounts["prometheus"][str(file.parent)] == mounts[name][str(written.parent)]


FAKE_WEED = """#!/bin/sh
read -r line
echo "$line" >> calls
case $line in
*list) [ ! -e bucket ] || printf '  hub\\tsize:0\\n';;
*create*) if [ "$(grep -c create calls)" -gt 2 ]; then touch bucket; else echo 'error: no filer' >&2; fi;;
esac
"""
"""SeaweedFS' shell, which prints errors and exits with 0, before and after a filer has joined."""


def make_bucket(folder: Path, weed: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the service ``bucket`` with a program in place of ``weed``, and without pauses."""
    for name, text in {"weed": weed, "sleep": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    service = COMPOSE["services"]["bucket"]
    words = [*service["entrypoint"], *(word.replace("$$", "$") for word in service["command"])]
    variables = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)


def test_the_bucket_is_created_again_until_the_store_lists_it(tmp_path: Path) -> None:
    assert make_bucket(tmp_path, FAKE_WEED).returncode == 0
    assert (tmp_path / "bucket").exists()
    assert make_bucket(tmp_path, FAKE_WEED).returncode == 0
    assert (tmp_path / "calls").read_text().count("create") == 3, "a bucket that is there is not created"


def test_a_bucket_that_cannot_be_created_fails(tmp_path: Path) -> None:
    failed = make_bucket(tmp_path, "#!/bin/sh\necho 'error: no filer' >&2\n")
    assert failed.returncode != 0
    assert "no filer" in failed.stderr


def test_a_database_that_is_still_being_created_is_not_healthy() -> None:
    check = COMPOSE["services"]["db"]["healthcheck"]["test"]
    assert "-h" in check, "the server that creates it answers at its socket, and at no address"


@pytest.mark.skipif(shutil.which("caddy") is None, reason="caddy is not installed")
def test_caddy_accepts_its_config(tmp_path: Path) -> None:
    hosts = {f"{name}_HOST": f"{name.lower()}.example.org" for name in ("API", "DASHBOARD", "GRAFANA")}
    words = ["caddy", "validate", "--adapter", "caddyfile", "--config", str(DEPLOY / "compose" / "Caddyfile")]
    done = subprocess.run(
        words, env={**os.environ, **hosts, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_images_of_others_have_a_version() -> None:
    images = {one["image"] for one in COMPOSE["services"].values() if not one["image"].startswith("gym-fed-")}
    assert [name for name in images if not re.search(r":v?\d", name)] == []


# ---- images ----


def test_every_image_runs_as_a_user_with_a_volume_and_its_own_check() -> None:
    stages = re.split(r"\nFROM ", DOCKERFILE)
    runtime = next(one for one in stages if " AS runtime\n" in one)
    assert "\nUSER 10001:10001\n" in runtime
    assert "\nVOLUME /data\n" in runtime
    targets = {one.splitlines()[0].split(" AS ")[1]: one for one in stages if one.startswith("runtime AS ")}
    assert {*targets} == OURS
    assert {name for name, one in targets.items() if "\nHEALTHCHECK " in one} == {"hub", "api"}
    copied = {name for line in re.findall(r"^COPY ([^-].*) \S+$", DOCKERFILE, re.M) for name in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert [
        name for name in copied if not any(name == one or name.startswith(f"{one}/") for one in kept)
    ] == []
    assert [name for name in copied if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["with-secrets", "start-hub", "start-api", "install-wheel", "trial"])
def test_scripts_of_images_are_sound_and_executable(name: str) -> None:
    path = DEPLOY / "docker" / name
    assert os.access(path, os.X_OK)
    subprocess.run(["sh", "-n", str(path)], check=True)


def with_secrets(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = str(DEPLOY / "docker" / "with-secrets")
    variables = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run([script, *words], env=variables, capture_output=True, text=True)


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    for text in ("a $(touch oops) `b` \"c\" 'd' \\e", "without a line's end"):
        (tmp_path / "one").write_text(text + "\n" if "end" not in text else text)
        done = with_secrets("printenv", "PGPASSWORD", PGPASSWORD_FILE=str(tmp_path / "one"))
        assert done.stdout == text + "\n", done.stderr
    assert not Path("oops").exists()


def test_without_a_file_the_variable_stays(tmp_path: Path) -> None:
    assert with_secrets("printenv", "PGPASSWORD", PGPASSWORD="given").stdout == "given\n"


@pytest.mark.parametrize("made", [False, True], ids=["missing", "empty"])
def test_a_secret_that_is_not_there_is_refused_by_name(made: bool, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    if made:
        file.touch()
    done = with_secrets("true", GYM_SERVER_PASSPHRASE_FILE=str(file))
    assert done.returncode == 78
    assert "GYM_SERVER_PASSPHRASE_FILE" in done.stderr
    assert str(file) in done.stderr


FAKE = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$1 $2" in "init --yes") mkdir -p "$GYM_SERVER_DIR/keys"; echo old > "$GYM_SERVER_DIR/gym-server.yaml";; esac
case "$1 $2" in "dashboard-keys add") echo gymweb-key;; esac
"""
"""A gym-server that writes down its words."""


def start_hub(folder: Path, script: str, **environment: str) -> tuple[int, list[str], str]:
    """Exit code, the calls of gym-server, and standard error of a start with a config in ``folder``, if it is there."""
    (folder / "bin").mkdir(exist_ok=True)
    fake = folder / "bin" / "gym-server"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    calls = folder / "calls"
    calls.write_text("")
    variables = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "CALLS": str(calls), **environment}
    variables["GYM_SERVER_DIR"] = str(folder / "hub")
    done = subprocess.run(["sh", "-c", script, "start-hub"], env=variables, capture_output=True, text=True)
    return done.returncode, calls.read_text().splitlines(), done.stderr


def test_a_hub_is_created_once_and_gets_its_config_at_every_start(tmp_path: Path) -> None:
    script = (DEPLOY / "docker" / "start-hub").read_text()
    config = tmp_path / "given.yaml"
    here = script.replace("/etc/gym/gym-server.yaml", str(config))
    code, calls, problem = start_hub(tmp_path, here)
    assert (code, calls) == (78, [])
    assert "GYM_ADDRESS" in problem
    config.write_text("new")
    code, calls, problem = start_hub(tmp_path, here, GYM_SERVER_PASSPHRASE="a secret of many")
    assert code == 0, problem
    assert calls == [
        "init --yes --address 127.0.0.1:9443 --encrypt-keys",
        "dashboard-keys remove prometheus",
        "dashboard-keys add prometheus --metrics",
        "run",
    ]
    assert "a secret of many" not in " ".join(calls)
    hub = tmp_path / "hub"
    assert (hub / "gym-server.yaml").read_text() == "new"
    assert (hub / "metrics.key").read_text() == "gymweb-key\n"
    config.write_text("newer")
    code, calls, _ = start_hub(tmp_path, here)
    assert (code, [call.strip() for call in calls]) == (0, ["run"])
    assert (hub / "gym-server.yaml").read_text() == "newer"


def test_without_a_config_the_address_makes_one(tmp_path: Path) -> None:
    script = (DEPLOY / "docker" / "start-hub").read_text().replace("/etc/gym/", f"{tmp_path}/none/")
    code, calls, _ = start_hub(tmp_path, script, GYM_ADDRESS="hub.example.org:9443")
    assert (code, calls[0]) == (0, "init --yes --address hub.example.org:9443")
    assert (tmp_path / "hub" / "gym-server.yaml").read_text() == "old\n"


@pytest.mark.parametrize("content", ["", "of another"])
def test_a_link_in_place_of_the_metrics_key_is_replaced_and_not_followed(
    tmp_path: Path, content: str
) -> None:
    script = (DEPLOY / "docker" / "start-hub").read_text().replace("/etc/gym/", f"{tmp_path}/none/")
    other, key = tmp_path / "other", tmp_path / "metrics" / "key"
    other.write_text(content)
    key.parent.mkdir()
    key.symlink_to(other)
    more = {"GYM_ADDRESS": "hub.example.org:9443", "GYM_METRICS_KEY_FILE": str(key)}
    code, _, problem = start_hub(tmp_path, script, **more)
    assert code == 0, problem
    assert other.read_text() == content
    assert not key.is_symlink()
    assert (key.read_text(), key.stat().st_mode & 0o777) == ("gymweb-key\n", 0o644)
    assert [file.name for file in key.parent.iterdir()] == ["key"]


def test_the_api_writes_its_metrics_key_without_following_a_link(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "gym"
    fake.write_text('#!/bin/sh\ncase "$*" in "api keys add"*) echo gym-key;; esac\n')
    fake.chmod(0o755)
    (tmp_path / "serving.yaml").write_text("")
    other, key = tmp_path / "other", tmp_path / "key"
    other.write_text("")
    key.symlink_to(other)
    script = (DEPLOY / "docker" / "start-api").read_text().replace("/etc/gym/", f"{tmp_path}/")
    for more in ({}, {"GYM_METRICS_KEY_FILE": str(key)}):
        variables = {"PATH": f"{fake.parent}:{os.environ['PATH']}", **more}
        subprocess.run(["sh", "-c", script, "start-api"], env=variables, check=True)
    assert (other.read_text(), key.is_symlink(), key.read_text()) == ("", False, "gym-key\n")
