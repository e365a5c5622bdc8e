"""Pods of a Kubernetes cluster: an Indexed Job whose pods each run a link, applied and deleted by kubectl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import traitlets

from nbdist.errors import ClusterError
from nbdist.launchers.remote import Plan, RemoteAgents, Slot

__all__ = ["KubernetesAgents", "manifest"]

KUBECTL_S = 60.0
POLL_S = 2.0


class KubernetesAgents(RemoteAgents):
    """An Indexed Job: one pod per node, one rank per GPU of the pod. The notebook must run where pods reach it."""

    patience = 600.0

    nodes = traitlets.Int(1, help="Number of pods.").tag(config=True)
    gpus_per_node = traitlets.Int(0, help="GPUs of each pod.").tag(config=True)
    ranks_per_node = traitlets.Int(0, help="Ranks of each pod; 0: one per GPU.").tag(config=True)
    cpus_per_rank = traitlets.Int(2).tag(config=True)
    memory_per_rank = traitlets.Unicode("8Gi").tag(config=True)
    shared_memory = traitlets.Unicode("8Gi", help="Size of /dev/shm, for loader workers and NCCL.").tag(config=True)
    image = traitlets.Unicode("", help="Image with Python, torch and nbdist.").tag(config=True)
    namespace = traitlets.Unicode("default").tag(config=True)
    python = traitlets.Unicode("python", help="The image's Python.").tag(config=True)
    kubectl_cmd = traitlets.List(traitlets.Unicode(), ["kubectl"]).tag(config=True)
    notebook_labels = traitlets.Dict(help="Labels of the notebook's pod, which the network policy lets in.").tag(
        config=True
    )

    @classmethod
    def make_plan(cls, n: int | None, setting: Mapping[str, Any]) -> Plan:
        if not setting["image"]:
            raise ClusterError("Which image? %cluster start --profile kubernetes --image registry.example/nbdist:1")
        nodes = setting["nodes"]
        per_node = setting["ranks_per_node"] or setting["gpus_per_node"] or (-(-n // nodes) if n else 1)
        if n is not None and n != nodes * per_node:
            raise ValueError(f"-n {n}, but {nodes} pods × {per_node} ranks are {nodes * per_node}.")
        return Plan(n=nodes * per_node, slots=tuple(Slot(node=i, label="", room=per_node) for i in range(nodes)))

    def describe(self) -> str:
        return json.dumps(
            self.manifest("(two lines: what to start, and the keys of this cluster's exchange)"), indent=2
        )

    def manifest(self, orders: str) -> dict[str, Any]:
        name = "nbdist-" + Path(self.profile_dir).name.removeprefix("nbdist-").replace("_", "-").lower()
        return manifest(name, self.settings, ranks=self.plan.slots[0].room, orders=orders)

    async def submit(self) -> None:
        first = self.first_line(self.plan.slots[0].room)
        second = self.second_line(node_from=["JOB_COMPLETION_INDEX"])
        self._manifest = self.manifest(f"{json.dumps(first)}\n{json.dumps(second)}\n")
        # Our own copy for the controller, to take back what was applied when this notebook ends without a word.
        names = [f"{item['kind']}/{item['metadata']['name']}" for item in self._manifest["items"]]
        self._delete = ["-n", self.setting("namespace"), "delete", "--ignore-not-found", "--wait=false", *names]
        await asyncio.to_thread(self._kubectl, ["apply", "-f", "-"], json.dumps(self._manifest))
        farewell = Path(self.profile_dir) / "farewell.json"
        farewell.write_text(json.dumps([[*self.kubectl_cmd, *self._delete]]))
        self.report(event="state", text=f"{names[-1]} applied: {len(self.plan.slots)} pods")

    async def finish(self) -> None:
        if getattr(self, "_delete", None) is not None:
            deadline = time.monotonic() + POLL_S
            while self._hellos and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            with contextlib.suppress(ClusterError):
                await asyncio.to_thread(self._kubectl, self._delete, "")

    def _kubectl(self, arguments: list[str], text: str) -> None:
        command = [*self.kubectl_cmd, *arguments]
        try:
            ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=KUBECTL_S)
        except FileNotFoundError:
            raise ClusterError(f"There is no {command[0]} on this host.") from None
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{command[0]} did not answer in {KUBECTL_S:g} s.") from None
        if ran.returncode:
            raise ClusterError(f"{command[0]}: {(ran.stderr or ran.stdout).strip()}")


def manifest(name: str, setting: Mapping[str, Any], *, ranks: int, orders: str) -> dict[str, Any]:
    """Give the objects of one cluster: Secret, NetworkPolicy and Indexed Job, as one List."""
    labels = {"app.kubernetes.io/name": "nbdist", "nbdist/cluster": name}
    metadata = {"name": name, "namespace": setting["namespace"], "labels": labels}
    limits = {"cpu": str(setting["cpus_per_rank"] * ranks), "memory": _times(setting["memory_per_rank"], ranks)}
    if setting["gpus_per_node"]:
        limits["nvidia.com/gpu"] = str(setting["gpus_per_node"])
    peers: list[dict[str, Any]] = [{"podSelector": {"matchLabels": {"nbdist/cluster": name}}}]
    if setting["notebook_labels"]:
        peers.append({"podSelector": {"matchLabels": dict(setting["notebook_labels"])}})
    container = {
        "name": "ranks",
        "image": setting["image"],
        # the orders hold a key: a file of the Secret, not a variable or an argument
        "command": [setting["python"], "-m", "nbdist.engine", "--orders", "/run/nbdist/orders"],
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "orders", "mountPath": "/run/nbdist", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
        "containers": [container],
        "volumes": [
            {"name": "orders", "secret": {"secretName": name, "defaultMode": 0o440}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": setting["shared_memory"]}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    job = {
        "completionMode": "Indexed",
        "completions": setting["nodes"],
        "parallelism": setting["nodes"],
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": 600,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    policy = {
        # gloo and NCCL ask nobody for a password: only the pods of this cluster, and the notebook, may talk to them
        "podSelector": {"matchLabels": {"nbdist/cluster": name}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": peers}],
    }
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": metadata,
                "type": "Opaque",
                "stringData": {"orders": orders},
            },
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": policy},
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
        ],
    }


def _times(quantity: str, factor: int) -> str:
    number = quantity.rstrip("KMGTEikm")
    return f"{int(number) * factor}{quantity[len(number) :]}"
