"""What a cluster of pods is made of: Secret, NetworkPolicy, Indexed Job; and whether Kubernetes knows their fields."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from nbdist.errors import ClusterError

__all__ = ["check", "manifest"]

MODELS = {"Secret": "V1Secret", "NetworkPolicy": "V1NetworkPolicy", "Job": "V1Job"}
SHOWN = 3  # fields that are wrong


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
        "containers": [_merged(container, setting.get("container", {}))],
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
        # The loss of one pod is not that of the others: it alone is made anew, when nothing of the lost one runs any
        # more, and joins the notebook again.
        "backoffLimitPerIndex": 6,
        "podReplacementPolicy": "Failed",
        "ttlSecondsAfterFinished": 600,
        "template": {"metadata": {"labels": labels}, "spec": _merged(pod, setting.get("pod", {}))},
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


def check(items: list[dict[str, Any]]) -> None:
    """Compare objects with Kubernetes' own schema: every field known and of its type.

    Raises
    ------
    ClusterError
        Naming the fields that are not.
    """
    from kubernetes import client
    from pydantic import ValidationError

    for item in items:
        try:
            getattr(client, MODELS[item["kind"]]).model_validate(item)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
            more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
            raise ClusterError(
                f"{item['kind']} is not as Kubernetes defines it: {'; '.join(wrong[:SHOWN])}{more}. "
                "See c.KubernetesAgents.pod and c.KubernetesAgents.container."
            ) from None


def can_check() -> bool:
    """Whether Kubernetes' client, which knows the schema, is installed."""
    return importlib.util.find_spec("kubernetes") is not None


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Give ``ours`` with the user's own fields: mappings are merged, lists go on."""
    merged = dict(ours)
    for name, value in theirs.items():
        known = merged.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(known, value)
        elif isinstance(known, list) and isinstance(value, (list, tuple)):
            merged[name] = [*known, *value]
        else:
            merged[name] = value
    return merged


def _times(quantity: str, factor: int) -> str:
    number = quantity.rstrip("KMGTEikm")
    return f"{int(number) * factor}{quantity[len(number) :]}"
