"""Checks files of deploy/ with the checkers of the programs that read them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest

if TYPE_CHECKING:
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
KUBERNETES = ("1.29", "1.37")
"""Kubernetes versions to check: the oldest that starts sidecars as these do, and the newest with published schemas."""


def find_tool(name: str, source: str) -> str:
    """Return the path of a program; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed ({source})")
    return found


def run_checker(*command: str, cwd: Path = DEPLOY, **environment: str) -> str:
    """Run a program that must not fail; return its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_manifest(document: dict[str, Any], version: str) -> None:
    """Raise if a version of Kubernetes does not accept a resource, or the project that defines its kind does not."""
    if document["kind"] == "PodMonitor":
        unknown = _not_in(document, POD_MONITOR, "PodMonitor")
        assert not unknown, unknown
    elif document["kind"] in ("JobSet", "TrainJob"):
        read = read_as_kubeflow(document)
        assert read is not None
        assert read.to_dict() == document, "what it does not know is left out"
        for replicated in document["spec"].get("replicatedJobs", ()):
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **replicated["template"]}
            kubernetes_validate.validate(job, version, strict=True)
    else:
        kubernetes_validate.validate(document, version, strict=True)


def read_as_kubeflow(document: dict[str, Any]) -> JobsetV1alpha2JobSet | TrainerV1alpha1TrainJob | None:
    """Read a JobSet or a TrainJob with the model in Kubeflow Trainer's own package, which takes a second to load."""
    if document["kind"] == "JobSet":
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

        return JobsetV1alpha2JobSet.from_dict(document)
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    return TrainerV1alpha1TrainJob.from_dict(document)


POD_MONITOR: dict[str, Any] = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "namespace": str, "labels": dict},
    "spec": {
        "jobLabel": str, "podTargetLabels": [str], "selector": {"matchLabels": dict, "matchExpressions": list},
        "namespaceSelector": {"any": bool, "matchNames": [str]}, "sampleLimit": int,
        "podMetricsEndpoints": [{
            "port": str, "portNumber": int, "path": str, "scheme": str, "interval": str, "scrapeTimeout": str,
            "honorLabels": bool, "filterRunning": bool,
            "relabelings": [
                {"sourceLabels": [str], "targetLabel": str, "regex": str, "replacement": str, "action": str}
            ],
        }],
    },
}  # fmt: skip
"""The shape of the used part of a PodMonitor (v1), from prometheus-operator.dev/docs/api-reference/api.

Its schema comes with the operator, not with Kubernetes.
"""


def _not_in(content: Any, allowed: Any, path: str) -> list[str]:
    """Return the paths in a resource that a shape does not allow."""
    if isinstance(allowed, dict):
        if not isinstance(content, dict):
            return [path]
        unknown = [f"{path}.{key}" for key in content.keys() - allowed.keys()]
        return unknown + [
            found
            for key in content.keys() & allowed.keys()
            for found in _not_in(content[key], allowed[key], f"{path}.{key}")
        ]
    if isinstance(allowed, list):
        if not isinstance(content, list):
            return [path]
        return [found for at, one in enumerate(content) for found in _not_in(one, allowed[0], f"{path}[{at}]")]
    return [] if isinstance(content, allowed) else [path]
