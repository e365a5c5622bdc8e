"""Kubernetes without a cluster: an emulated API server, strict about what it is given, and a node that runs pods.

The server is kmock's, over HTTP, driven by the official client. The node makes of each pod of an Indexed Job a process
of this machine, in a UTS namespace of its own, and of what cannot run what a real node or scheduler reports of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import aiohttp
import kmock
import kubernetes_validate

NAMESPACE = "research"
IMAGE = "registry.example/nbdist:1"
VERSION = "1.30"
TICK_S = 0.2
GRACE_S = 5.0

RESOURCES = (
    ("", "v1", "secrets", "Secret"),
    ("", "v1", "pods", "Pod"),
    ("", "v1", "events", "Event"),
    ("batch", "v1", "jobs", "Job"),
    ("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
)
PATHS = {
    kind: f"{'/apis/' + group if group else '/api'}/{version}/namespaces/{NAMESPACE}/{plural}"
    for group, version, plural, kind in RESOURCES
}
VERBS = ["get", "list", "create", "delete", "patch", "watch"]

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
clusters: [{{name: test, cluster: {{server: "{url}"}}}}]
users: [{{name: test, user: {{token: a-token}}}}]
"""


class Refused(kmock.KubernetesError):
    status = 400


class Strict(kmock.KubernetesEmulator):
    """Gives every object a uid, selects by label, and refuses objects with fields that Kubernetes does not know."""

    async def _handle(self, request: Any) -> Any:
        if request.action == kmock.action.CREATE and request.data["kind"] in PATHS:
            if request.params.get("fieldValidation") == "Strict":
                try:
                    kubernetes_validate.validate(request.data, VERSION, strict=True)
                except kubernetes_validate.ValidationError as error:
                    raise Refused(error.message) from None
            request.data["metadata"].setdefault("uid", secrets.token_hex(16))
        return await super()._handle(request)

    async def _serve_list(self, request: Any) -> Any:
        listed = await super()._serve_list(request)
        for label in filter(None, request.params.get("labelSelector", "").split(",")):
            name, _, value = label.partition("=")
            listed["items"] = [i for i in listed["items"] if i["metadata"].get("labels", {}).get(name) == value]
        return listed


class Kubernetes:
    """One namespace and one node; a context manager that leaves nothing. ``env`` is what a user of it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"KUBECONFIG": str(folder / "kubeconfig")}
        self.pods: dict[str, subprocess.Popen[bytes]] = {}  # those that run
        self._made: dict[tuple[str, int], int] = {}  # Job and index -> how many pods it has had
        self._loop = asyncio.new_event_loop()
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Kubernetes:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)
        self._loop.close()

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """The objects that there are."""
        return asyncio.run_coroutine_threadsafe(self._list(kind), self._loop).result(10)

    @property
    def everything(self) -> list[str]:
        """Kind and name of all that a cluster is made of."""
        kinds = ("Secret", "NetworkPolicy", "Job", "Pod")
        return [f"{kind}/{found['metadata']['name']}" for kind in kinds for found in self.objects(kind)]

    # -- the server --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        emulator = Strict()
        for group, version, plural, kind in RESOURCES:
            emulator.resources[kmock.resource(group, version, plural)] = {
                "kind": kind,
                "namespaced": True,
                "verbs": VERBS,
            }
        emulator[kmock.subresource("log")] << self._log
        async with emulator, kmock.Server(emulator) as server, aiohttp.ClientSession(server.url) as session:
            self._session = session
            Path(self.env["KUBECONFIG"]).write_text(KUBECONFIG.format(url=str(server.url).rstrip("/")))
            self._ready.set()
            while not self._over.is_set():
                await self._work()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._over.wait(), TICK_S)
            for name in list(self.pods):
                await self._end(name)

    def _log(self, request: Any) -> bytes:
        return (self.folder / f"{request.name}.log").read_bytes()

    async def _list(self, kind: str) -> list[dict[str, Any]]:
        async with self._session.get(PATHS[kind]) as answer:
            return list((await answer.json())["items"])

    async def _say(self, name: str, status: dict[str, Any]) -> None:
        async with self._session.patch(f"{PATHS['Pod']}/{name}", json={"status": status}):
            pass

    # -- the Job's controller, the scheduler and the node ------------------------------------------------------------

    async def _work(self) -> None:
        jobs = {job["metadata"]["name"]: job for job in await self._list("Job")}
        taken = set()
        for pod in await self._list("Pod"):
            name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
            if labels["job-name"] not in jobs:
                await self._end(name)
                async with self._session.delete(f"{PATHS['Pod']}/{name}"):
                    pass
            elif pod.get("status", {}).get("phase") != "Failed":
                taken.add((labels["job-name"], labels["index"]))
                await self._look_after(name)
        for name, job in jobs.items():
            for index in range(job["spec"]["completions"]):
                if (name, str(index)) not in taken:
                    await self._make(name, index, job["spec"]["template"])

    async def _make(self, job: str, index: int, template: dict[str, Any]) -> None:
        count = self._made[job, index] = self._made.get((job, index), 0) + 1
        if count > 3:
            return
        name = f"{job}-{index}-{secrets.token_hex(3)}"
        labels = {**template["metadata"]["labels"], "job-name": job, "index": str(index)}
        (container,) = template["spec"]["containers"]
        if "quota" in template["spec"].get("nodeSelector", {}):
            message = f'Error creating: pods "{name}" is forbidden: exceeded quota: gpus'
            event = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "involvedObject": {"kind": "Job", "name": job},
                "type": "Warning",
                "reason": "FailedCreate",
                "message": message,
            }
            async with self._session.post(PATHS["Event"], json=event):
                return
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        async with self._session.post(PATHS["Pod"], json=pod):
            pass
        if "nvidia.com/gpu" in container["resources"]["limits"]:
            message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            await self._say(name, {"phase": "Pending", "conditions": [unscheduled]})
        elif container["image"] != IMAGE:
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{container["image"]}"'}
            await self._say(name, {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]})
        else:
            await self._run(name, job, index, container)

    async def _run(self, name: str, job: str, index: int, container: dict[str, Any]) -> None:
        found = [secret for secret in await self._list("Secret") if secret["metadata"]["name"] == job]
        if not found:
            return  # deleted meanwhile; a pod waits for ever for a Secret that does not come
        mounted = self.folder / name
        mounted.mkdir()
        for file, text in found[0]["stringData"].items():
            (mounted / file).write_text(text)
        command = [part.replace("/run/nbdist", str(mounted)) for part in container["command"]]
        named = 'hostname "$0"; exec "$@"'  # as an Indexed Job names them
        within = ["unshare", "--uts", "bash", "-c", named, f"{job}-{index}"]
        environment = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
        with open(self.folder / f"{name}.log", "wb") as log:
            self.pods[name] = subprocess.Popen(
                [*within, *command], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        await self._say(name, {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]})

    async def _look_after(self, name: str) -> None:
        process = self.pods.get(name)
        if process is None or process.poll() is None:
            return
        del self.pods[name]
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        reason = "OOMKilled" if code == 137 else "Error" if code else "Completed"
        ended = {"reason": reason, "exitCode": code}
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]}
        await self._say(name, status)

    async def _end(self, name: str) -> None:
        process = self.pods.pop(name, None)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        deadline = self._loop.time() + GRACE_S
        while process.poll() is None and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        process.kill()
        process.wait()
