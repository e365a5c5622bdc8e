"""Pods, on an emulated API server that the official client talks to, and a node that runs them as processes here."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import ClusterError
from nbdist.launchers.kubernetes import in_words, last_words
from nbdist.launchers.kubernetes_api import Api, describe
from nbdist.launchers.kubernetes_manifest import check, manifest
from nbdist.processes import dry_run
from tests.kernel import Kernel

if TYPE_CHECKING:
    from tests.multinode.pods import Kubernetes

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

IMAGE = "registry.example/nbdist:1"
START = (
    "%cluster start --profile kubernetes --namespace research --address 127.0.0.1 --timeout 60 "
    f"--python {sys.executable}"
)
WHOLE = "%%distributed\nx = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nx.item()"
SETTING: dict[str, Any] = {
    "image": IMAGE,
    "nodes": 2,
    "gpus_per_node": 8,
    "cpus_per_rank": 4,
    "memory_per_rank": "32Gi",
    "shared_memory": "16Gi",
    "namespace": "research",
    "python": "python",
    "notebook_labels": {"app": "jupyter"},
    "pod": {},
    "container": {},
}


@pytest.fixture(scope="module")
def kubernetes(need: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    need("kmock", "kubernetes", "setpriv")
    from tests.multinode.pods import Kubernetes

    with Kubernetes(tmp_path_factory.mktemp("k8s")) as kubernetes:
        yield kubernetes


@pytest.fixture
def notebook(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(env=kubernetes.env, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        yield kernel
    wait_for_nothing(kubernetes)


def wait_for_nothing(kubernetes: Kubernetes) -> None:
    deadline = time.monotonic() + 20
    while left := [*kubernetes.everything, *kubernetes.pods]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_two_pods_are_one_world_a_lost_one_comes_back_and_a_killed_notebook_leaves_nothing(
    kubernetes: Kubernetes, notebook: Kernel
) -> None:
    started = notebook.check(f"{START} --image {IMAGE} --nodes 2 --ranks-per-node 2", timeout=80)
    assert "4 engines on 2 hosts · world of 4 ranks" in started.text
    assert "[0-3] 10.0" in notebook.check(WHOLE).text
    (secret,) = kubernetes.objects("Secret")
    (job,) = kubernetes.objects("Job")
    owner = secret["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"]) == ("Job", job["metadata"]["uid"])  # the keys go when the Job does
    where = notebook.check("%%distributed\nimport socket\nmine = rank\nprint(socket.gethostname(), local_rank)").text
    for line in ("-0 0", "-0 1", "-1 0", "-1 1"):
        assert job["metadata"]["name"] + line in where, where

    (lost,) = [name for name in kubernetes.pods if f"{job['metadata']['name']}-1-" in name]
    kubernetes.pods[lost].send_signal(signal.SIGKILL)
    cell = notebook.run("%%distributed\nwhile True: dist.barrier()", timeout=40)
    assert "-1 was lost" in cell.text, cell
    assert "ranks 2-3 replaced by empty ones" in notebook.check("%cluster repair", timeout=60).text
    assert "[0-3] 10.0" in notebook.check(WHOLE).text
    kept = notebook.check("%%distributed\nprint(globals().get('mine'))").text
    assert "[0] 0" in kept and "[1] 1" in kept and "[2-3] None" in kept, kept

    assert len(kubernetes.everything) == 3 + 3  # the pod that failed is still told of
    notebook.kill()
    wait_for_nothing(kubernetes)


def test_pods_that_do_not_come_up_are_named_with_the_reason_and_deleted(
    kubernetes: Kubernetes, notebook: Kernel
) -> None:
    absent = notebook.run(f"{START} --image registry.example/none:1 -n 1", timeout=40)
    assert absent.error is not None and absent.error[0] == "ClusterError", absent
    assert 'ImagePullBackOff: Back-off pulling image "registry.example/none:1". Is the name right' in absent.text
    assert "pod nbdist-" in absent.text and "0 of 1 engines can start" in absent.text, absent
    wait_for_nothing(kubernetes)

    crashed = notebook.run(f"{START} --image {IMAGE} --nodes 1 -n 1 --python /bin/false", timeout=40)
    assert "Error, exit code 1" in crashed.text and "pod nbdist-" in crashed.text, crashed
    wait_for_nothing(kubernetes)

    # a full cluster may have room later: told while one waits, until that is over or Stop is pressed
    waiting = notebook.send(f"{START} --image {IMAGE} --nodes 1 --gpus-per-node 1 --backend gloo")
    notebook.wait(waiting, timeout=20, until=lambda cell: "Unschedulable" in cell.text or cell.ended)
    assert "1 of 1 pod: Pending, Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu" in waiting.text
    notebook.interrupt()
    notebook.wait(waiting, timeout=20)
    assert waiting.error is not None and waiting.error[0] == "KeyboardInterrupt", waiting
    wait_for_nothing(kubernetes)


def test_what_the_server_refuses_or_has_against_a_job_is_told_in_its_words(
    kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubernetes.env["KUBECONFIG"])
    api = Api("research")
    items = manifest("nbdist-x", {**SETTING, "pod": {"nodeSelector": {"quota": "full"}}}, ranks=8, orders="{}")["items"]
    api.create(items)
    with pytest.raises(ClusterError, match="refused to create Secret in namespace research: "):
        api.create(items)
    deadline = time.monotonic() + 10
    while not (said := api.warnings("nbdist-x")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert re.fullmatch(
        r'FailedCreate: Error creating: pods "nbdist-x-\S+" is forbidden: exceeded quota: gpus', said[-1]
    )
    api.delete("nbdist-x")
    api.delete("nbdist-x")  # what is gone already is no error
    assert api.job("nbdist-x") is None and kubernetes.everything == []


@pytest.mark.sample
def test_a_dry_run_needs_no_server_and_one_that_cannot_be_reached_is_one_line(
    need: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    text = dry_run("kubernetes", None, {"image": IMAGE, "nodes": 2, "gpus_per_node": 8})
    for part in (
        '"completionMode": "Indexed"',
        '"nvidia.com/gpu": "8"',
        '"medium": "Memory"',
        '"kind": "NetworkPolicy"',
    ):
        assert part in text, text
    assert "secret_key" not in text
    with pytest.raises(ClusterError, match=r"No way to Kubernetes: .* Give KUBECONFIG, or run the notebook in a pod"):
        Api("research")
    (tmp_path / "kubeconfig").write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:9'}}]\nusers: [{name: a, user: {token: t}}]\n"
    )
    down = "^The Kubernetes API server http://127.0.0.1:9 does not answer: Connection refused$"
    with pytest.raises(ClusterError, match=down):
        Api("research").delete("nbdist-x")


@pytest.mark.sample
def test_fields_that_kubernetes_does_not_know_are_refused_by_name_before_anything_is_created(
    need: Callable[..., None],
) -> None:
    need("kubernetes")
    more = {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    container = {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}], "volumeMounts": [{"name": "d", "mountPath": "/d"}]}
    items = manifest("nbdist-x", {**SETTING, "pod": more, "container": container}, ranks=8, orders="{}")["items"]
    check(items)
    spec = items[-1]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"gpu": "h100"} and len(spec["containers"][0]["volumeMounts"]) == 4
    for wrong, error in (
        ({"nodeSelektor": {"gpu": "h100"}}, r"Job is not as Kubernetes defines it: .*nodeSelektor: .*not permitted"),
        ({"nodeSelector": {"gpu": 1}}, r"nodeSelector.gpu: .*string"),
        ({"volumes": [{"name": "d", "nfs": {"server": "s"}}]}, r"volumes.3.nfs.path: .*required"),
    ):
        with pytest.raises(ClusterError, match=error):
            check(manifest("nbdist-x", {**SETTING, "pod": wrong}, ranks=8, orders="{}")["items"])


@pytest.mark.sample
@pytest.mark.parametrize(
    ("status", "text", "never"),
    [
        ({"phase": "Running"}, "", False),
        ({"phase": "Pending"}, "Pending, waits for a node", False),
        (
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ErrImagePull",
            False,
        ),
        (
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
            "Pending, waits for a node",
            False,
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}}}
                ],
            },
            "CreateContainerConfigError: no secret",
            True,
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}],
            },
            "OOMKilled, exit code 137. Give more with c.KubernetesAgents.memory_per_rank.",
            True,
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            "Evicted: The node was low on memory.",
            True,
        ),
    ],
)
def test_the_state_of_a_pod_is_told_in_words(status: dict[str, Any], text: str, never: bool) -> None:
    assert describe({"status": status}) == (text, never)


@pytest.mark.sample
def test_pods_with_the_same_to_say_are_one_line_and_a_refusal_to_make_them_is_told() -> None:
    waiting = [("a", "Pending, waits for a node"), ("b", "Pending, waits for a node")]
    refused = 'FailedCreate: pods "c" is forbidden: exceeded quota'
    assert in_words(waiting, 4, [refused]) == f"2 of 4 pods: Pending, waits for a node; {refused}"
    log = 'noise\n{"event": "failed", "host": "a", "text": "cannot reach the controller at 10.0.0.1:4711"}\n'
    assert last_words(log) == "cannot reach the controller at 10.0.0.1:4711"
    assert last_words("ModuleNotFoundError: No module named 'nbdist'\n").startswith("ModuleNotFoundError")
