"""Write a JobSet for Kubernetes, with the config in a ConfigMap."""

from __future__ import annotations

from typing import Any

from gym_fed.training.launch.base import CHECKPOINT_SECONDS, PORT, ClusterJob, ClusterScheduler, yaml_text
from gym_fed.version import __version__

_CONFIG = "/config/train.yaml"
_WORK = "/work"


class JobSet(ClusterScheduler):
    """A JobSet of one pod per machine; pods find the first pod by the name that JobSet's headless service gives it.

    A failed pod ends the others. The set is restarted up to three times, and the run resumes. The working folder is a
    volume claim that all pods share.
    """

    name = "jobset"
    submit = "kubectl apply -f FILE"

    def text(self, job: ClusterJob) -> str:
        return _HEADER + yaml_text(self._config_map(job), self._job_set(job))

    def _config_map(self, job: ClusterJob) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": job.name},
            "data": {"train.yaml": job.file.read_text(encoding="utf-8")},
        }

    def _job_set(self, job: ClusterJob) -> dict[str, Any]:
        pods = {"parallelism": job.nodes, "completions": job.nodes, "backoffLimit": 0}
        template = {"spec": {**pods, "completionMode": "Indexed", "template": {"spec": self._pod(job)}}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": {
                "failurePolicy": {"maxRestarts": 3},
                "network": {"enableDNSHostnames": True},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
            },
        }

    def _pod(self, job: ClusterJob) -> dict[str, Any]:
        command = job.arguments(_CONFIG)
        if job.nodes > 1:
            command += ["--rdzv-endpoint", f"{job.name}-node-0-0.{job.name}:{PORT}"]
        resources = {"nvidia.com/gpu": job.gpus} if job.gpus else {"cpu": job.nproc}
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": CHECKPOINT_SECONDS,
            "containers": [
                {
                    "name": "train",
                    "image": f"gym-fed-client:{__version__}",
                    "command": command,
                    "workingDir": _WORK,
                    "ports": [{"containerPort": PORT}],
                    "resources": {"limits": resources, "requests": resources},
                    "volumeMounts": [
                        {"name": "config", "mountPath": "/config", "readOnly": True},
                        {"name": "work", "mountPath": _WORK},
                        {"name": "shm", "mountPath": "/dev/shm"},
                    ],
                }
            ],
            "volumes": [
                {"name": "config", "configMap": {"name": job.name}},
                {"name": "work", "persistentVolumeClaim": {"claimName": "gym-train"}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL shares memory between processes
            ],
        }


_HEADER = """# Needs the JobSet controller. The claim gym-train (ReadWriteMany) holds the model and the rows at
# the paths in the config, relative to /work, and the run is written there. Set your own image,
# node selector and claim.
"""
