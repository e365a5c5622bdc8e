"""The API server of a Kubernetes cluster, as far as a cluster of pods needs it.

``python -m nbdist.launchers.kubernetes_api NAMESPACE NAME [CONTEXT]`` deletes what was created under that name: the
controller runs it when the notebook has gone without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from nbdist.errors import ClusterError

__all__ = ["Api", "deletion", "describe"]

REQUEST_S = 20.0
LOG_LINES = 20

# container states that no waiting mends
HOPELESS = (
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)
FIXES = {
    "ImagePullBackOff": "Is the name right, and may the cluster pull it? c.KubernetesAgents.pod = "
    '{"imagePullSecrets": [{"name": …}]}',
    "InvalidImageName": "Give another --image.",
    "OOMKilled": "Give more with c.KubernetesAgents.memory_per_rank.",
}


class Api:
    """The calls that one cluster makes; each ends within seconds, or with a ClusterError in one line."""

    def __init__(self, namespace: str, context: str = "") -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise ClusterError(
                f"Kubernetes' client is not installed for {sys.executable}: pip install 'nbdist[kubernetes]'"
            ) from None
        settings = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ and not context:
                config.load_incluster_config(client_configuration=settings)
            else:
                file = os.environ.get("KUBECONFIG")  # as it is now: the client has read it when it was imported
                config.load_kube_config(file or None, context=context or None, client_configuration=settings)
        except config.ConfigException as error:
            raise ClusterError(
                f"No way to Kubernetes: {error}. Give KUBECONFIG, or run the notebook in a pod with a service account."
            ) from None
        settings.retries = False  # as urllib3 takes it: the first failure is told
        self.namespace, self.host = namespace, settings.host
        self._client = client.ApiClient(settings)
        core = self._core = client.CoreV1Api(self._client)
        batch = self._batch = client.BatchV1Api(self._client)
        network = client.NetworkingV1Api(self._client)
        self._create = {
            "Secret": core.create_namespaced_secret,
            "NetworkPolicy": network.create_namespaced_network_policy,
            "Job": batch.create_namespaced_job,
        }
        self._patch = {
            "Secret": core.patch_namespaced_secret,
            "NetworkPolicy": network.patch_namespaced_network_policy,
        }
        self._delete = {
            "Job": batch.delete_namespaced_job,
            "NetworkPolicy": network.delete_namespaced_network_policy,
            "Secret": core.delete_namespaced_secret,
        }

    def create(self, items: list[dict[str, Any]]) -> None:
        """Create all objects, the Job last; it then owns the others, so that they go when it does.

        Raises
        ------
        ClusterError
            When the server cannot be reached or refuses one of them.
        """
        made: dict[str, Any] = {}
        for item in items:
            made = self._call(
                f"create {item['kind']}", self._create[item["kind"]], self.namespace, item, field_validation="Strict"
            )
        uid = made.get("metadata", {}).get("uid", "")
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": items[-1]["metadata"]["name"], "uid": uid}
        for item in items[:-1] if uid else []:
            # without it the Secret would stay where neither notebook nor controller lived to delete it
            with contextlib.suppress(ClusterError):
                patch = {"metadata": {"ownerReferences": [owner]}}
                self._call("patch", self._patch[item["kind"]], item["metadata"]["name"], self.namespace, patch)

    def delete(self, name: str) -> None:
        """Delete what was created under a name, as far as it is there.

        Raises
        ------
        ClusterError
            When the server cannot be reached or refuses.
        """
        for kind, call in self._delete.items():
            options: dict[str, Any] = {"propagation_policy": "Background"} if kind == "Job" else {}
            self._call(f"delete {kind}", call, name, self.namespace, missing={}, **options)

    def job(self, name: str) -> dict[str, Any] | None:
        """Give the Job; None where it is gone."""
        return self._call("read Job", self._batch.read_namespaced_job, name, self.namespace, missing=None)  # type: ignore[no-any-return]

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Give the pods of a cluster."""
        call = self._core.list_namespaced_pod
        listed = self._call("list Pods", call, self.namespace, label_selector=f"nbdist/cluster={name}")
        return list(listed["items"])

    def warnings(self, name: str) -> list[str]:
        """Give what Kubernetes has said against a Job, oldest first: a quota, a policy of the namespace."""
        call = self._core.list_namespaced_event
        listed = self._call("list Events", call, self.namespace, field_selector=f"involvedObject.name={name}")
        return [
            f"{event.get('reason', '')}: {event.get('message', '')}"
            for event in listed["items"]
            if event.get("type") == "Warning" and event.get("involvedObject", {}).get("name") == name
        ]

    def log(self, pod: str) -> str:
        """Give the end of what a pod's ranks' link has said; nothing where it cannot be had."""
        with contextlib.suppress(ClusterError):
            call = self._core.read_namespaced_pod_log
            return str(self._call("read log", call, pod, self.namespace, tail_lines=LOG_LINES, text=True)).strip()
        return ""

    def _call(
        self, what: str, call: Any, *arguments: Any, missing: Any = ..., text: bool = False, **options: Any
    ) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            # the answer as it came: a server that is newer than our client may say more than this knows
            answer = call(*arguments, _preload_content=False, _request_timeout=REQUEST_S, **options)
            data = answer.data.decode(errors="replace")
            return data if text else json.loads(data)
        except ApiException as error:
            if error.status == 404 and missing is not ...:
                return missing
            raise ClusterError(f"Kubernetes refused to {what} in namespace {self.namespace}: {_said(error)}") from None
        except urllib3.exceptions.HTTPError as error:
            why = re.sub(r"^\[Errno \d+\] ", "", str(error).rpartition(": ")[2]) or type(error).__name__
            raise ClusterError(f"The Kubernetes API server {self.host} does not answer: {why}") from None


def describe(pod: Mapping[str, Any]) -> tuple[str, bool]:
    """Put a pod's state into words, nothing where it runs; and tell whether it will never run."""
    status = pod.get("status", {})
    phase = status.get("phase", "Pending")
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        state = container.get("state", {})
        waiting, ended = state.get("waiting"), state.get("terminated")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            reason = waiting["reason"]
            return _sentence(reason, waiting.get("message", "")), reason in HOPELESS
        if ended and ended.get("exitCode"):
            reason = ended.get("reason", "Error")
            return _sentence(f"{reason}, exit code {ended['exitCode']}", ended.get("message", ""), reason), True
    if phase == "Failed":
        return _sentence(status.get("reason", "Failed"), status.get("message", "")), True
    if phase in ("Running", "Succeeded"):
        return "", False
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _sentence(f"Pending, {condition.get('reason', 'unscheduled')}", condition.get("message", "")), False
    waiting_for = "its image and volumes" if pod.get("spec", {}).get("nodeName") else "a node"
    return f"Pending, waits for {waiting_for}", False


def _sentence(reason: str, message: str, key: str = "") -> str:
    text = f"{reason}: {message.strip()}" if message.strip() else reason
    fix = FIXES.get(key or reason, "")
    return f"{text.rstrip('.')}. {fix}" if fix else text


def _said(error: Any) -> str:
    with contextlib.suppress(TypeError, ValueError, KeyError):
        return str(json.loads(error.body)["message"])
    return f"{error.status} {error.reason}"


def deletion(namespace: str, name: str, context: str) -> list[str]:
    """Give the command that deletes what was created under a name."""
    return [sys.executable, "-m", "nbdist.launchers.kubernetes_api", namespace, name, *([context] if context else [])]


def main() -> None:
    """Delete what the command line names."""
    namespace, name, *context = sys.argv[1:]
    Api(namespace, *context).delete(name)


if __name__ == "__main__":
    main()
