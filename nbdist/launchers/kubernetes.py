"""Pods of a Kubernetes cluster: an Indexed Job whose pods each run a link; created, watched and deleted from here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import traitlets

from nbdist.errors import ClusterError
from nbdist.launchers.kubernetes_api import Api, deletion, describe
from nbdist.launchers.kubernetes_manifest import can_check, check, manifest
from nbdist.launchers.remote import Plan, RemoteAgents, Slot

__all__ = ["KubernetesAgents"]

WAITING_POLL_S = 1.0
RUNNING_POLL_S = 10.0
NO_PODS_S = 3.0  # after which it is asked why there are none
END_S = 2.0
SHOWN = 3  # pods that have the same to say


class KubernetesAgents(RemoteAgents):
    """An Indexed Job: one pod per node, one rank per GPU of the pod. The notebook must run where pods reach it."""

    patience = 600.0

    nodes = traitlets.Int(1, help="Number of pods.").tag(config=True)
    gpus_per_node = traitlets.Int(0, help="GPUs of each pod.").tag(config=True)
    ranks_per_node = traitlets.Int(0, help="Ranks of each pod; 0: one per GPU.").tag(config=True)
    cpus_per_rank = traitlets.Int(2, help="CPUs that each rank asks for, and is held to.").tag(config=True)
    memory_per_rank = traitlets.Unicode("8Gi", help="Memory that each rank asks for, and is held to.").tag(config=True)
    shared_memory = traitlets.Unicode("8Gi", help="Size of /dev/shm, for loader workers and NCCL.").tag(config=True)
    image = traitlets.Unicode("", help="Image with Python, torch and nbdist.").tag(config=True)
    namespace = traitlets.Unicode("default", help="Namespace of the job and its pods.").tag(config=True)
    context = traitlets.Unicode("", help="Of the kubeconfig; else its current one.").tag(config=True)
    python = traitlets.Unicode("python", help="The image's Python.").tag(config=True)
    pod = traitlets.Dict(help="Further fields of the pods: {'nodeSelector': {'gpu': 'h100'}}.").tag(config=True)
    container = traitlets.Dict(help="Further fields of their container: {'env': [...]}.").tag(config=True)
    notebook_labels = traitlets.Dict(help="Labels of the notebook's pod, which the network policy lets in.").tag(
        config=True
    )

    _api: Api | None = None
    _began = 0.0

    @classmethod
    def make_plan(cls, n: int | None, setting: Mapping[str, Any]) -> Plan:
        if not setting["image"]:
            raise ClusterError("Which image? %cluster start --profile kubernetes --image registry.example/nbdist:1")
        nodes = setting["nodes"]
        if nodes < 1:
            raise ValueError(f"--nodes {nodes}: at least 1.")
        per_node = setting["ranks_per_node"] or setting["gpus_per_node"] or (-(-n // nodes) if n else 1)
        if n is not None and n != nodes * per_node:
            raise ValueError(f"-n {n}, but {nodes} pods × {per_node} ranks are {nodes * per_node}.")
        return Plan(n=nodes * per_node, slots=tuple(Slot(node=i, label="", room=per_node) for i in range(nodes)))

    def describe(self) -> str:
        made = self.manifest("(two lines: what to start, and the keys of this cluster's exchange)")
        if can_check():
            check(made["items"])
        return json.dumps(made, indent=2)

    @property
    def name(self) -> str:
        """The name of this cluster's objects: letters and digits, as Kubernetes wants it."""
        return "nbdist-" + Path(self.profile_dir).name.removeprefix("nbdist-").replace("_", "0").lower()

    def manifest(self, orders: str) -> dict[str, Any]:
        return manifest(self.name, self.settings, ranks=self.plan.slots[0].room, orders=orders)

    def begin(self) -> None:
        # seconds, for the import of the client; the controller starts meanwhile
        where = self.setting("namespace"), self.setting("context")
        self._connecting = asyncio.get_running_loop().run_in_executor(None, Api, *where)

    async def submit(self) -> None:
        api = await asyncio.shield(self._connecting)
        first = self.first_line(self.plan.slots[0].room)
        second = self.second_line(node_from=["JOB_COMPLETION_INDEX"])
        items = self.manifest(f"{json.dumps(first)}\n{json.dumps(second)}\n")["items"]
        # what is interrupted here is created all the same: finish() waits for it, and deletes it
        self._creation = asyncio.get_running_loop().run_in_executor(None, self._create, api, items)
        await asyncio.shield(self._creation)
        count = len(self.plan.slots)
        self.report(event="state", text=f"job/{self.name} created: {count} pod{'s' if count > 1 else ''}")
        self._watching = asyncio.ensure_future(self._watch())

    async def finish(self) -> None:
        watching = getattr(self, "_watching", None)
        if watching is not None:
            watching.cancel()
        creation = getattr(self, "_creation", None)
        for future in filter(None, [getattr(self, "_connecting", None), creation]):
            await asyncio.wait([future])
            future.exception()  # was told where it was awaited first
        api, self._api = self._api, None
        if api is not None:
            deadline = time.monotonic() + END_S
            while self._hellos and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            with contextlib.suppress(ClusterError):  # what is told to end does, and the Job goes with its pods' end
                await asyncio.to_thread(api.delete, self.name)

    def revive(self, node: int) -> None:
        """Wait for the pod that Kubernetes makes in the place of a lost one."""
        if self._api is None or self._api.job(self.name) is None:
            raise ClusterError(f"job/{self.name} is gone, and with it the pods. %cluster start begins anew.")
        self._failures.clear()
        self._failed_at = 0.0

    def _on_line(self, event: dict[str, Any]) -> None:
        if event["event"] == "hello":
            before = self._hellos.get(event["node"])
            if before is not None and before["run_dir"] != event["run_dir"]:
                # Kubernetes has put a pod in the place of another before that was missed
                super()._on_line({"event": "ended", "node": event["node"], "host": before["host"]})
        super()._on_line(event)

    def _create(self, api: Api, items: list[dict[str, Any]]) -> None:
        check(items)
        farewell = deletion(api.namespace, self.name, self.setting("context"))
        (Path(self.profile_dir) / "farewell.json").write_text(json.dumps([farewell]))
        self._api, self._began = api, time.monotonic()
        api.create(items)

    async def _watch(self) -> None:
        """Follow the pods: what they wait for, and that one will not come up, or has ended, and why."""
        told, noticed = "", set[str]()
        while not self._stopping and self._api is not None:
            try:
                job, pods, warnings = await asyncio.to_thread(self._look, self._api)
            except ClusterError as error:  # it may answer again
                job, pods, warnings = {}, [], [str(error)]
            if job is None:
                self._over(f"job/{self.name} was deleted")
                return
            failure = failed(job)
            if failure:
                self._over(f"job/{self.name} failed: {failure}")
                return
            states = [(pod["metadata"]["name"], *describe(pod)) for pod in pods]
            hopeless = {name: text for name, text, never in states if never and name not in noticed}
            if hopeless:
                noticed |= set(hopeless)
                await self._give_up(hopeless)
            stage = in_words([(name, text) for name, text, _ in states if text], len(self.plan.slots), warnings)
            if stage and stage != told and not self._ran:
                told = stage
                self.report(event="state", text=stage)
            await asyncio.sleep(RUNNING_POLL_S if self._ran else WAITING_POLL_S)

    def _look(self, api: Api) -> tuple[dict[str, Any] | None, list[dict[str, Any]], list[str]]:
        job, pods = api.job(self.name), api.pods(self.name)
        late = len(pods) < len(self.plan.slots) and time.monotonic() - self._began > NO_PODS_S
        return job, pods, api.warnings(self.name)[-1:] if late and not self._ran else []

    async def _give_up(self, pods: Mapping[str, str]) -> None:
        """Say which pods will not come up, or have ended, and why: once for those with the same reason."""
        reasons: dict[str, list[str]] = {}
        for name, text in pods.items():
            assert self._api is not None
            log = await asyncio.to_thread(self._api.log, name) if "exit code" in text else ""
            said = last_words(log)
            reasons.setdefault(f"{text}: {said}" if said else text, []).append(name)
        for text, same in reasons.items():
            label = f"pod {', '.join(same[:SHOWN])}" + (f" and {len(same) - SHOWN} more" if len(same) > SHOWN else "")
            if self._ran:
                self.report(event="notice", text=f"{label}: {text}")
            else:
                self.fail(label, text)

    def _over(self, text: str) -> None:
        if self._stopping:
            return
        if not self._ran:
            self.report(event="failed", text=text)
        else:
            self.report(event="notice", text=text)


def failed(job: Mapping[str, Any]) -> str:
    """Say why Kubernetes has given a Job up; nothing where it has not."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition.get("type") == "Failed" and condition.get("status") == "True":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    return ""


def in_words(waiting: list[tuple[str, str]], expected: int, warnings: list[str]) -> str:
    """Say what is waited for: ``2 of 4 pods: Pending, Unschedulable: 0/3 nodes are available``."""
    texts: dict[str, int] = {}
    for _, text in waiting:
        texts[text] = texts.get(text, 0) + 1
    parts = [f"{count} of {expected} pod{'s' if expected > 1 else ''}: {text}" for text, count in texts.items()]
    return "; ".join([*parts, *warnings])


def last_words(log: str) -> str:
    """Give what a link reported last, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(line)["text"])
    return lines[-1] if lines else ""
