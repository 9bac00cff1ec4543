"""Each file in deploy/ against the checker of the program that reads it."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sentinel.config import settings as config
from sentinel.node import paths
from sentinel.runs.steps import RunStep
from sentinel.store import History, Store
from tests.deploy.checkers import DEPLOY, KUBERNETES, check_manifest, find_tool, run_checker
from tests.second_user import NOBODY, as_user
from tests.source import SOURCE

ROOT = Path(__file__).parent.parent.parent
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users can reach."""
    with tempfile.TemporaryDirectory(prefix="deploy", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def test_compose_is_what_the_specification_allows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    run_checker(*command, "compose/compose.yaml", "compose/nodes.yaml")
    broken = tmp_path / "compose.yaml"
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    broken.write_text(text.replace("volumes:\n      - ./sentinel", "volume:\n      - ./sentinel"))
    with pytest.raises(AssertionError, match="volume"):
        run_checker(*command, str(broken))


def test_compose_mounts_only_what_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    assert compose["services"].keys() == {"demo", "prometheus", "alertmanager", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / "compose" / source).exists(), volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{port}: for this machine alone"
        image = service.get("image")
        assert image is None or re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", image), f"{image}: pinned"
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (target,) = prometheus["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"demo:{config.HTTP_PORT}"


def test_prometheus_and_alertmanager_take_their_files() -> None:
    run_checker(find_tool("promtool", "Debian package prometheus"), "check", "config", "prometheus/prometheus.yml")
    amtool, alertmanager = (
        find_tool("amtool", "Debian package prometheus-alertmanager"),
        "alertmanager/alertmanager.yml",
    )
    assert "SUCCESS" in run_checker(amtool, "check-config", alertmanager)
    route = [amtool, "config", "routes", "test", f"--config.file={alertmanager}"]
    assert run_checker(*route, "severity=critical", "alertname=NonFiniteLoss").split()[0] == "pager"
    assert run_checker(*route, "severity=warning", "alertname=GradientSpike").split()[0] == "nobody"


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_takes_the_manifests(path: Path, version: str) -> None:
    for document in documents(path):
        check_manifest(document, version)


def test_a_misspelt_key_is_found() -> None:
    (*_, daemon_set) = documents(DEPLOY / "kubernetes" / "daemonset.yaml")
    daemon_set["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        check_manifest(daemon_set, KUBERNETES[-1])
    (monitor,) = documents(DEPLOY / "kubernetes" / "podmonitor.yaml")
    monitor["spec"]["podMetricsEndpoints"][0]["ports"] = "metrics"
    with pytest.raises(AssertionError, match=r"PodMonitor\.spec\.podMetricsEndpoints\[0\]\.ports"):
        check_manifest(monitor, KUBERNETES[-1])
    for name, key in [("jobset", "failurePolicies"), ("trainjob", "runtime")]:
        (job,) = documents(DEPLOY / "kubernetes" / f"{name}.yaml")
        job["spec"][key] = {}
        with pytest.raises(AssertionError, match="left out"):
            check_manifest(job, KUBERNETES[-1])
    (job_set,) = documents(DEPLOY / "kubernetes" / "jobset.yaml")
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["commands"] = []
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check_manifest(job_set, KUBERNETES[-1])


def test_pods_agree_with_each_other_and_with_sentinel() -> None:
    (monitor,) = documents(DEPLOY / "kubernetes" / "podmonitor.yaml")
    # Users' monitors and policies select by this label: a public name, whatever modules are called.
    assert monitor["spec"]["selector"]["matchLabels"] == {"sentinel.daemon.metrics": "true"}
    for name in ("sidecar", "daemonset"):
        settings, workload = documents(DEPLOY / "kubernetes" / f"{name}.yaml")[-2:]
        content = config.parse_settings(settings["data"]["sentinel.toml"], Path("/etc/sentinel/sentinel.toml"))
        assert content.daemon.listen == "0.0.0.0"
        template = workload["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        pod = template["spec"]
        (sentinel,) = [c for c in [*pod["containers"], *pod.get("initContainers", ())] if c["name"] == "sentinel"]
        assert {"name": "metrics", "containerPort": config.HTTP_PORT} in sentinel["ports"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    pod = documents(DEPLOY / "kubernetes" / "sidecar.yaml")[-1]["spec"]["template"]["spec"]
    folder = pod["initContainers"][0]["args"][-1]
    for container in [*pod["containers"], *pod["initContainers"]]:  # the sidecar: for `kubectl exec -c sentinel`
        addresses = [one["value"] for one in container["env"] if one["name"] == "SENTINEL_ADDRESS"]
        assert addresses == [f"unix:{folder}/sentinel.sock"], container["name"]


def test_the_settings_of_the_demo_are_valid() -> None:
    file = DEPLOY / "compose" / "sentinel.toml"
    assert config.parse_settings(file.read_text(), file).daemon.listen == "0.0.0.0"
    assert tomllib.loads(file.read_text())


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    verify = [find_tool("systemd-analyze", "Debian package systemd"), "verify", "--man=no"]
    verify += ["--user"] if unit.stem.endswith("-user") else []
    copied = tmp_path / unit.name
    installed = shutil.which("sentinel", path=str(Path(sys.executable).parent)) or shutil.which("true")
    copied.write_text(unit.read_text().replace("/opt/sentinel/bin/sentinel", str(installed)))
    assert run_checker(*verify, str(copied), XDG_RUNTIME_DIR=str(tmp_path)) == ""
    copied.write_text(copied.read_text().replace("Restart=always", "Restart=perhaps"))
    said = subprocess.run(
        [*verify, str(copied)], capture_output=True, text=True, env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    )
    assert "perhaps" in said.stderr + said.stdout


@pytest.mark.parametrize("script", sorted((DEPLOY / "slurm").iterdir()), ids=lambda path: path.name)
def test_scripts_can_be_parsed(script: Path) -> None:
    run_checker("bash", "-n", str(script))


def run_epilog(folder: Path, *runs: str) -> None:
    """Run the epilog of job 417 on a node where NOBODY has the histories of these runs."""
    for run in runs:
        store = Store(folder / "state" / str(NOBODY) / "runs" / f"{run}.sqlite", run="train", run_id=run)
        store.records.add_step(0, RunStep(0, 1.0, {0: {"loss": 2.5}}, {"loss": 2.5}))
        store.write()  # and not closed: the newest is in the write-ahead log
    environment = {
        "SENTINEL_STATE": str(folder / "state"), "SENTINEL_ARCHIVE": str(folder / "archive"),
        "SLURM_JOB_ID": "417", "SLURM_JOB_UID": str(NOBODY), "SLURM_JOB_GID": str(NOBODY),
    }  # fmt: skip
    run_checker(str(DEPLOY / "slurm" / "epilog.sh"), **environment)


def test_the_epilog_brings_a_jobs_histories_to_its_user(open_folder: Path) -> None:
    run_epilog(open_folder, "slurm-417-0-train", "slurm-417_1-train", "slurm-1417-train", "slurm-4170-train")
    copies = sorted((open_folder / "archive").rglob("*.sqlite"))
    assert [path.name for path in copies] == ["slurm-417-0-train.sqlite", "slurm-417_1-train.sqlite"]
    with History(copies[0]) as history:
        assert list(history.series("loss").values) == [2.5]
    with sqlite3.connect(copies[1]) as copied:
        assert copied.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    copied.close()


@pytest.mark.root
def test_the_epilog_writes_as_the_user_and_for_the_user_alone(open_folder: Path) -> None:
    """A job's user owns the folder of its copies, and may put a link into it before the epilog of the next node."""
    (open_folder / "roots").mkdir(mode=0o700)
    own = open_folder / "archive" / str(NOBODY)
    own.mkdir(parents=True)
    (own / "417").symlink_to(open_folder / "roots")
    os.chown(own, NOBODY, NOBODY)
    run_epilog(open_folder, "417")
    assert list((open_folder / "roots").iterdir()) == []
    (own / "417").unlink()
    run_epilog(open_folder)
    [copy] = own.rglob("*.sqlite")
    for path in (copy, copy.parent, copy.parent.parent):
        status = path.stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode) & 0o077) == (NOBODY, 0), path


@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh"])
def test_prolog_and_epilog_never_fail(script: str) -> None:
    """A node whose prolog or epilog fails is drained."""
    run_checker(
        str(DEPLOY / "slurm" / script),
        SENTINEL_BIN="/nowhere",
        SENTINEL_ARCHIVE="/proc/none",
        SLURM_JOB_ID="1",
        SLURM_JOB_UID="1",
    )
    run_checker(str(DEPLOY / "slurm" / script))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_steps_of_the_dockerfile_make_a_healthy_daemon(tmp_path: Path) -> None:
    """The steps run without a container engine: what the image's daemon needs must be in the image."""
    command = [sys.executable, str(DEPLOY / "docker" / "follow.py"), str(DEPLOY / "docker" / "Dockerfile"), "--borrow"]
    context = tmp_path / "context"
    context.mkdir()
    allowed = re.findall(r"^!(\S+)", (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    for name in allowed:  # what .dockerignore lets through
        (context / name).parent.mkdir(exist_ok=True)
        if (SOURCE / name).is_file():
            shutil.copy(SOURCE / name, context / name)
        else:
            shutil.copytree(SOURCE / name, context / name, symlinks=True)
    said = run_checker(*command, "--context", str(context), cwd=ROOT)
    assert "healthy" in said
    assert "ended as it was told to" in said


@pytest.mark.root
def test_the_images_user_has_places_for_socket_and_histories(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root makes the image's folders; a daemon refuses a runtime directory that is not its user's own."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    [made] = re.findall(r"^RUN mkdir -p -m 1777 (.+)$", text, re.MULTILINE)
    places = {name: f"{open_folder}{place}" for name, place in re.findall(r"(SENTINEL_[A-Z]+)=(\S+)", text)}
    run_checker("mkdir", "-p", "-m", "1777", *(f"{open_folder}{folder}" for folder in made.split()))
    for name, place in places.items():
        monkeypatch.setenv(name, place)

    def find_places() -> list[str]:
        return [str(paths.private_directory(paths.run_directory("service"))), str(paths.state_directory())]

    assert as_user(10001, find_places) == [f"{places['SENTINEL_RUNTIME']}/service", places["SENTINEL_STATE"]]


def test_the_images_health_check_asks_its_daemon_and_no_proxy(tmp_path: Path) -> None:
    """Docker hands the proxies of its settings to each container."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    [command] = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)
    (tmp_path / "-").mkdir()
    (tmp_path / "-" / "healthy").touch()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _, *words = json.loads(command.replace(":9477", f":{server.server_port}"))
        run_checker(sys.executable, *words, http_proxy="http://127.0.0.1:9", no_proxy="")
        server.shutdown()


def test_the_image_does_not_run_as_root() -> None:
    steps = (DEPLOY / "docker" / "Dockerfile").read_text().splitlines()
    assert [line for line in steps if line.startswith("USER")][-1] == "USER 10001:10001"
    assert steps[-1] == "FROM daemon"
    assert not any(re.search(r"apt-get|curl|latest", line) for line in steps)
