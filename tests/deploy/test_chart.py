"""The Helm chart: it renders the manifests of deploy/kubernetes, and each of its values has an effect."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel import __version__
from sentinel.config import settings as config
from tests.deploy.checkers import DEPLOY, KUBERNETES, check_manifest, find_tool, run_checker

CHART = DEPLOY / "helm" / "sentinel"
Document = dict[str, Any]

JOB: Document = {"mode": "job"}
MONITOR: Document = {"podMonitor": {"enabled": True}}
POLICY: Document = {"networkPolicy": {"enabled": True}}
OTHER: dict[str, tuple[Document, Any]] = {
    "mode": ({}, "job"),
    "image.repository": ({}, "registry.example/sentinel"),
    "image.tag": ({}, "9.9.9"),
    "image.pullPolicy": ({}, "Always"),
    "settings": ({}, '[daemon]\nlisten = "0.0.0.0"\nexternal_url = "https://grafana.example/{run}"\n'),
    "rules": ({}, {"mine.yaml": "groups: []\n", "more.yml": "groups:\n  - name: more\n"}),
    "env": ({}, [{"name": "SLACK_URL", "valueFrom": {"secretKeyRef": {"name": "slack", "key": "url"}}}]),
    "podMonitor.enabled": ({}, True),
    "podMonitor.interval": (MONITOR, "60s"),
    "podMonitor.labels": (MONITOR, {"release": "prometheus"}),
    "networkPolicy.enabled": ({}, True),
    "networkPolicy.from": (
        POLICY,
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    ),
    "daemonset.runtimeClassName": ({}, ""),
    "daemonset.nodeSelector": ({}, {"nvidia.com/gpu.present": None, "pool": "gpu"}),
    "daemonset.tolerations": ({}, []),
    "daemonset.resources": ({}, {"limits": {"memory": "2Gi"}}),
    "job.image": (JOB, "registry.example/train:1"),
    "job.command": (JOB, ["python", "train.py", "--name", "a: b"]),
    "job.gpus": (JOB, 0),
    "job.backoffLimit": (JOB, 0),
    "job.user": (JOB, 20002),
    "job.historySize": (JOB, "4Gi"),
    "job.resources": (JOB, {"requests": {"cpu": "1"}}),
}
"""Value of the chart -> (other values that bring it into use, a value that is not its default)."""


def render(folder: Path, values: Document, *options: str) -> list[Document]:
    """Return the documents that `helm template` makes, by kind and name."""
    (folder / "values.yaml").write_text(json.dumps(values))
    command = [find_tool("helm", "https://helm.sh/docs/intro/install"), "template", "sentinel", str(CHART)]
    text = run_checker(*command, "-f", str(folder / "values.yaml"), *options, KUBECONFIG=os.devnull)
    return sorted(yaml.safe_load_all(text), key=lambda one: (one["kind"], one["metadata"]["name"]))


def set_value(values: Document, path: str, value: Any) -> Document:
    """Return the values with one more."""
    section, _, key = path.partition(".")
    return values | {section: values.get(section, {}) | {key: value} if key else value}


def list_values(values: Document) -> set[str]:
    """Return `section.key` of each value, and keys without sections as they are."""
    sections = {name for name, value in values.items() if isinstance(value, dict) and value}
    return (values.keys() - sections) | {f"{section}.{key}" for section in sections for key in values[section]}


def find_pod(documents: list[Document]) -> Document:
    """Return the template of the workload's pods."""
    [template] = [one["spec"]["template"] for one in documents if one["kind"] in ("DaemonSet", "Job")]
    assert isinstance(template, dict)
    return template


def test_the_chart_is_that_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    run_checker(find_tool("helm", "https://helm.sh/docs/intro/install"), "lint", "--strict", str(CHART))


@pytest.mark.parametrize(("mode", "manifest"), [("daemonset", "daemonset"), ("job", "sidecar")])
def test_the_charts_pods_are_those_of_the_manifests(mode: str, manifest: str, tmp_path: Path) -> None:
    pod = find_pod(render(tmp_path, {"mode": mode}))["spec"]
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        container.pop("imagePullPolicy", None)
    *_, workload = yaml.safe_load_all((DEPLOY / "kubernetes" / f"{manifest}.yaml").read_text())
    assert pod == workload["spec"]["template"]["spec"]


def test_every_value_is_tried() -> None:
    assert list_values(yaml.safe_load((CHART / "values.yaml").read_text())) == OTHER.keys()


def test_kubernetes_takes_what_the_chart_renders(tmp_path: Path) -> None:
    check_documents(render(tmp_path, {}))


@pytest.mark.slow
@pytest.mark.parametrize("path", OTHER)
def test_kubernetes_takes_what_each_value_changes(path: str, tmp_path: Path) -> None:
    values, other = OTHER[path]
    documents = render(tmp_path, set_value(values, path, other))
    assert documents != render(tmp_path, values), f"{path} changes nothing"
    check_documents(documents)


def check_documents(documents: list[Document]) -> None:
    """Check documents against the schemas, and against each other."""
    for document in documents:
        for version in KUBERNETES:
            check_manifest(document, version)
    pod = find_pod(documents)
    specs = [one["spec"] for one in documents if "spec" in one]
    selectors = [spec.get("selector") or spec.get("podSelector") or {"matchLabels": {}} for spec in specs]
    assert all(one["matchLabels"].items() <= pod["metadata"]["labels"].items() for one in selectors)
    containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes.keys()
    maps = {one["metadata"]["name"]: one["data"] for one in documents if one["kind"] == "ConfigMap"}
    assert {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume} == maps.keys()
    settings = config.parse_settings(maps["sentinel"]["sentinel.toml"], Path("/etc/sentinel/sentinel.toml"))
    assert settings.daemon.listen == "0.0.0.0"


def test_settings_and_rules_arrive_as_they_were_written(tmp_path: Path) -> None:
    settings, rules = OTHER["settings"][1], OTHER["rules"][1]
    documents = render(tmp_path, {"settings": settings, "rules": rules})
    maps = {one["metadata"]["name"]: one["data"] for one in documents if one["kind"] == "ConfigMap"}
    assert maps == {"sentinel": {"sentinel.toml": settings}, "sentinel-rules": rules}
    others = render(tmp_path, {"settings": settings})
    assert find_pod(documents)["metadata"] != find_pod(others)["metadata"], "a pod starts again where they have changed"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "deamonset"}, "/mode"),
        ({"image": {"tga": "1"}}, "tga"),
        ({"job": {"gpus": "8"}}, "/job/gpus"),
        ({"rules": {"mine.toml": ""}}, "mine.toml"),
    ],
)
def test_a_mistake_in_the_values_is_refused(values: Document, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        render(tmp_path, values)


def test_a_cluster_that_starts_no_sidecars_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="kubeVersion"):
        render(tmp_path, {}, "--kube-version", "1.28")
