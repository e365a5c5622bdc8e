"""A Slurm job: one sbatch script, one link per node, watched through squeue and cancelled by its number."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import traitlets

from nbdist.errors import ClusterError
from nbdist.launchers.remote import Plan, RemoteAgents, Slot

__all__ = ["SlurmAgents"]

WAITING_POLL_S = 1.0
RUNNING_POLL_S = 10.0
DYING_POLL_S = 0.2
COMMAND_S = 20.0
END_S = 3.0
DYING_S = 5.0  # for Slurm to see that a job is over whose links have ended
ENDED = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "COMPLETED")
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING")
OF_A_JOB = re.compile(r"SLURM_(JOB|STEP|NTASKS|NNODES|PROCID|LOCALID|NODEID)")
FAREWELL = "farewell.json"  # commands that the controller runs when the notebook has gone without a word

REQUEUED = (
    "Slurm has put the job back into its queue: {state}. What its ranks held is lost. When it runs again, "
    "%cluster repair puts empty ranks in their places; %cluster stop cancels it."
)

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name=nbdist-{name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{requests}#SBATCH --output={output}
#SBATCH --signal=B:USR1@{notice}
#SBATCH --requeue
#SBATCH --no-kill
# One link per node; it starts the node agent, which forks a rank for each GPU.
# --no-kill, --kill-on-bad-exit=0, --wait=0: the loss of one node is not that of the job. --input=all: each reads the
# order. --requeue: a job that Slurm preempts comes back, and its links find the notebook again.
launch() {{
    if [ "${{SLURM_JOB_NUM_NODES:-1}}" -gt 1 ]; then
        exec srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --input=all "$@"
    else
        exec "$@"
    fi
}}
launch {command} <<'NBDIST'
{first}
{second}
NBDIST
"""


class SlurmAgents(RemoteAgents):
    """A batch job that this notebook submits, waits for, and cancels when it ends."""

    patience = 600.0  # a job waits in the queue

    nodes = traitlets.Int(0, help="Number of nodes; 0: as many as the ranks need.").tag(config=True)
    gpus_per_node = traitlets.Int(0, help="GPUs of each node that the job asks for.").tag(config=True)
    ranks_per_node = traitlets.Int(0, help="Ranks of each node; 0: one per GPU.").tag(config=True)
    cpus_per_rank = traitlets.Int(0, help="CPU cores of each rank; 0: as Slurm decides.").tag(config=True)
    partition = traitlets.Unicode("").tag(config=True)
    account = traitlets.Unicode("").tag(config=True)
    time = traitlets.Unicode("", help="Time limit as sbatch takes it: 60, or 4:00:00.").tag(config=True)
    extra = traitlets.List(traitlets.Unicode(), help="Further options of sbatch: --constraint=a100.").tag(config=True)
    notice = traitlets.Int(120, help="Seconds before the time limit at which the notebook is told.").tag(config=True)

    job: str = ""
    _cancelled = False
    _requeued = False  # the job has been through its queue again since ranks were started
    _lost_at = 0.0  # when the last of its hosts had gone
    _state = ""  # the job's, in words

    @classmethod
    def make_plan(cls, n: int | None, setting: Mapping[str, Any]) -> Plan:
        per_node = setting["ranks_per_node"] or setting["gpus_per_node"]
        nodes = setting["nodes"]
        if not per_node:
            per_node = math.ceil(n / nodes) if n and nodes else (n or 1)
        if not nodes:
            nodes = math.ceil((n or per_node) / per_node)
        if n is None:
            n = nodes * per_node
        if n != nodes * per_node:
            raise ValueError(
                f"-n {n}, but {nodes} node{'s' if nodes > 1 else ''} × {per_node} ranks are {nodes * per_node}."
            )
        return Plan(n=n, slots=tuple(Slot(node=i, label="", room=per_node) for i in range(nodes)))

    @classmethod
    def peers(cls, setting: Mapping[str, Any]) -> Iterable[str]:
        command = ["sinfo", "-h", "-N", "-o", "%o"]
        if setting["partition"]:
            command += ["-p", setting["partition"]]
        return run(command).split()[:1]

    def describe(self) -> str:
        return self.script(exchange={"(the address and keys of this cluster's exchange)": ""})

    def script(self, *, exchange: Mapping[str, Any]) -> str:
        """Give the batch script."""
        per_node = self.plan.slots[0].room
        gpus, cpus = self.setting("gpus_per_node"), self.setting("cpus_per_rank")
        requests = [
            f"--gpus-per-node={gpus}" if gpus else "",
            f"--cpus-per-task={cpus * per_node}" if cpus else "",
            f"--partition={self.setting('partition')}" if self.setting("partition") else "",
            f"--account={self.setting('account')}" if self.setting("account") else "",
            f"--time={self.setting('time')}" if self.setting("time") else "",
            *self.setting("extra"),
        ]
        first = self.first_line(per_node)
        second = {"exchange": dict(exchange), "keep": bool(self.order.get("keep")), "node_from": ["SLURM_NODEID"]}
        return TEMPLATE.format(
            name=Path(self.profile_dir).name.removeprefix("nbdist-"),
            nodes=len(self.plan.slots),
            requests="".join(f"#SBATCH {request}\n" for request in requests if request),
            output=self._output,
            notice=self.setting("notice"),
            command=shlex.join([self.setting("python"), "-m", "nbdist.engine"]),
            first=json.dumps(first),
            second=json.dumps(second),
        )

    async def submit(self) -> None:
        assert self._address is not None
        path = Path(self.profile_dir) / "slurm.sbatch"
        path.touch(mode=0o700)
        path.write_text(self.script(exchange=self._address.as_dict()))
        # what is interrupted here has been submitted all the same: its number is needed to cancel it. No task, which
        # the end of an interrupted start would cancel
        sbatch = functools.partial(run, ["sbatch", "--parsable", str(path)], check=True)
        self._submission = asyncio.get_running_loop().run_in_executor(None, sbatch)
        await asyncio.shield(self._submission)
        self._take_number(self._submission.result())
        self.report(event="state", text=f"job {self.job} submitted")
        self._watching = asyncio.ensure_future(self._watch())

    async def finish(self) -> None:
        watching = getattr(self, "_watching", None)
        if watching is not None:
            watching.cancel()
        submission = getattr(self, "_submission", None)
        if submission is not None and not self.job and not self._cancelled:
            with contextlib.suppress(ClusterError):
                self._take_number(await submission)
        if self.job:
            deadline = time.monotonic() + END_S
            while self._hellos and time.monotonic() < deadline:  # ranks end by themselves, and leave nothing then
                await asyncio.sleep(0.05)
            job, self.job, self._cancelled = self.job, "", True
            await asyncio.to_thread(run, ["scancel", job])

    def _take_number(self, text: str) -> None:
        numbers = re.findall(r"\d+", text)
        if not numbers:
            raise ClusterError(f"sbatch gave no job number: {text.strip()!r}")
        # --parsable gives "12" or "12;cluster"; a wrapper may ignore it and say "Submitted batch job 12"
        self.job = numbers[0] if text.strip()[0].isdigit() else numbers[-1]
        (Path(self.profile_dir) / FAREWELL).write_text(json.dumps([["scancel", self.job]]))

    @property
    def _output(self) -> str:
        return str(Path(self.profile_dir) / "log" / "slurm.out")

    async def _watch(self) -> None:
        """Follow the job: what it waits for, that it failed, that its time is up."""
        began, told, waited, ends = time.monotonic(), "", False, 0.0
        while not self._stopping:
            text = await asyncio.to_thread(run, ["squeue", "-h", "-j", self.job, "-o", "%T|%r|%S|%e"])
            fields = text.strip().split("\n")[0].split("|") if text.strip() else []
            state = self._state = describe(self.job, fields)
            if fields and fields[0].startswith("PENDING"):
                waited = True
            if fields and fields[0].split()[0] in ENDED:
                self._over(f"job {self.job} {fields[0]} ({fields[1] if len(fields) > 1 else 'no reason given'})")
                return
            if not fields and (waited or time.monotonic() - began > 5):
                self._over(f"job {self.job} is not in the queue any more")
                return
            if fields and self._ran and not self._hellos and not self._requeued:
                if fields[0] in QUEUED:
                    self._requeued = True
                    self.report(event="notice", text=REQUEUED.format(state=state))
                elif fields[0] == "RUNNING" and time.monotonic() - self._lost_at > DYING_S:
                    self._over(f"job {self.job} runs, but no host of it answers")
                    return
            if state and state != told and not self._hellos:
                told = state
                self.report(event="state", text=state)
            if self._hellos and end_of(fields) != ends:
                ends = end_of(fields)
                self.report(event="limit", job=self.job, ends=ends)
            await self._pause()

    async def _pause(self) -> None:
        """Wait until it is time to look again: at once when the last host has gone."""
        dying = self._ran and not self._requeued
        deadline = time.monotonic() + (RUNNING_POLL_S if self._hellos else DYING_POLL_S if dying else WAITING_POLL_S)
        had_hosts = bool(self._hellos)
        while time.monotonic() < deadline and bool(self._hellos) == had_hosts:
            await asyncio.sleep(0.1)

    def all_lost(self) -> None:
        """Leave it to the watch over the queue whether this is the end: a job that was preempted comes back."""
        self._lost_at = time.monotonic()

    def all_came(self) -> None:
        if self._requeued:
            self._requeued = False
            text = f"job {self.job} runs again. Its ranks are empty: %cluster repair puts them in their places."
            self.report(event="notice", text=text)

    def revive(self, node: int) -> None:
        if self._requeued and not self._hellos:
            raise ClusterError(f"{self._state or f'job {self.job}'}. Wait until it runs, or end it: %cluster stop.")
        super().revive(node)

    def _over(self, text: str) -> None:
        if self._stopping:
            return
        with contextlib.suppress(OSError):
            tail = Path(self._output).read_text(errors="replace").strip()[-1500:]
            text += ("\n  " + tail.replace("\n", "\n  ")) if tail else ""
        if not self._ran:
            self.fail("slurm", text)
            return
        self.report(event="notice", text=text)
        if not self._hellos:
            self.notify_stop({"exit_code": 1})


def describe(job: str, fields: list[str]) -> str:
    """Put squeue's line into words: ``job 12 PENDING (Priority), starts 14:05``."""
    if not fields:
        return ""
    state, reason, start, _ = (*fields, "", "", "", "")[:4]
    text = f"job {job} {state}"
    if state.startswith("PENDING"):
        text += f" ({reason})" if reason and reason != "None" else ""
        text += f", starts {start.replace('T', ' ')}" if start and start != "N/A" else ""
    return text


def end_of(fields: list[str]) -> float:
    """Give the time at which the job's limit ends it, in seconds since 1970; 0 where there is no limit."""
    try:
        return time.mktime(time.strptime(fields[3], "%Y-%m-%dT%H:%M:%S"))
    except (IndexError, ValueError):  # N/A
        return 0.0


def run(command: list[str], *, check: bool = False) -> str:
    """Run a command of Slurm; give what it printed, or nothing where it is missing or fails.

    Raises
    ------
    ClusterError
        When ``check`` and it did not succeed.
    """
    try:
        # Jupyter interrupts the kernel's whole process group: an sbatch in it ends, and the job that it had submitted
        # already waits on, with nobody who knows its number
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            stdin=subprocess.DEVNULL,
            env=quiet(os.environ),
            start_new_session=True,
        )
    except FileNotFoundError:
        if check:
            raise ClusterError(f"There is no {command[0]} on this host. Is this a login node of the cluster?") from None
        return ""
    except subprocess.TimeoutExpired:
        if check:
            raise ClusterError(f"{command[0]} did not answer in {COMMAND_S:g} s.") from None
        return ""
    if check and ran.returncode:
        text = (ran.stderr or ran.stdout).strip().splitlines()
        raise ClusterError(f"{command[0]}: {text[-1] if text else f'exit code {ran.returncode}'}")
    return ran.stdout if not ran.returncode else ""


def quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """Give an environment without what an allocation that the notebook runs in would add to a new job's options."""
    return {
        k: v for k, v in environment.items() if not re.match(r"SLURM_(JOB|STEP|NTASKS|NNODES|PROCID|LOCALID|NODEID)", k)
    }
