"""What a cell shows while it runs and what stays in the notebook."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.cluster.checks import fails, group_is_whole, value
from tests.kernel import Kernel


def test_lines_stream_while_the_cell_runs(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%distributed\nimport time\nfor i in range(4): print('step', i); time.sleep(0.5)")
    assert cell.text == "".join(f"[0-1] step {i}\n" for i in range(4))
    for i in range(4):
        assert cell.seconds_until(rf"step {i}") < 0.5 * i + 0.5


def test_lines_of_different_ranks_are_whole_and_under_their_rank(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed\nimport sys, time\n"
        "for i in range(20):\n"
        "    for piece in ('rank ', str(rank), ' line ', str(i), '\\n'): sys.stdout.write(piece); sys.stdout.flush()"
    )
    for rank in (0, 1):
        own = [line for line in cell.text.splitlines() if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] rank {rank} line {i}" for i in range(20)]


def test_all_output_of_a_cell_is_there_when_it_ends(shared_notebook: Kernel) -> None:
    for i in range(20):
        cell = shared_notebook.check(f"%%distributed\nprint('last word', {i})")
        assert cell.text == f"[0-1] last word {i}\n"


def test_what_child_processes_and_libraries_write_is_shown(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed\nimport os, subprocess, time\n"
        "subprocess.run(['echo', 'from a child'])\nos.write(2, b'from a library\\n');\ntime.sleep(0.4)"
    )
    assert "[0-1] from a child\n" in cell.text
    assert "[0-1] from a library\n" in cell.text


def test_output_of_a_thread_that_outlives_the_cell_is_not_lost_or_put_elsewhere(shared_notebook: Kernel) -> None:
    shared_notebook.check(
        "%%distributed\nimport threading, time\n"
        "def late():\n    time.sleep(0.3); print('late word')\n"
        "thread = threading.Thread(target=late); thread.start()"
    )
    cell = shared_notebook.check("%%distributed\nthread.join(); print('next cell')")
    assert "next cell" in cell.text


def test_rich_output_reaches_the_page(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed\nfrom IPython.display import HTML, Markdown, display\n"
        "display(HTML('<b>same</b>')); display(Markdown(f'*{rank}*'))"
    )
    shown = [o["data"] for o in cell.outputs if o["output_type"] == "display_data"]
    assert [data["text/html"] for data in shown if "text/html" in data] == ["<b>same</b>"]
    assert [data["text/markdown"] for data in shown if "text/markdown" in data] == ["*0*", "*1*"]


def test_figures_of_the_ranks_reach_the_page(shared_notebook: Kernel) -> None:
    pytest.importorskip("matplotlib")
    cell = shared_notebook.check(
        "%%distributed\n%matplotlib inline\nimport matplotlib.pyplot as plt\n"
        "plt.figure(figsize=(1, 1)); plt.plot([0, rank]); plt.show()",
        timeout=90,
    )
    pictures = [o["data"]["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    assert pictures[0] != pictures[1]


def test_a_display_that_is_updated_ends_in_its_last_state(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed\nfrom IPython.display import HTML, display\n"
        "handle = display(HTML('step 0'), display_id=True)\n"
        "for i in range(1, 4): handle.update(HTML(f'step {i} of {rank}'))"
    )
    shown = [o["data"]["text/html"] for o in cell.outputs if "text/html" in o.get("data", {})]
    assert shown == ["step 3 of 0", "step 3 of 1"]


@pytest.mark.parametrize("module", ["tqdm.auto", "tqdm", "tqdm.notebook"])
def test_a_progress_bar_is_one_line_a_rank(shared_notebook: Kernel, module: str) -> None:
    cell = shared_notebook.check(
        f"%%distributed\nimport time\nfrom {module} import tqdm\nfor i in tqdm(range(200)): time.sleep(.005)",
        timeout=60,
    )
    lines = sorted(line for line in cell.text.splitlines() if line.strip())
    assert len(lines) == 2, cell
    for rank in (0, 1):
        assert re.match(rf"\[{rank}\] 100%\|.*\| 200/200 ", lines[rank])
    assert cell.seconds_until(r"\d/200") < 1
    states = {m["content"]["data"].get("text/plain") for _, m in cell.messages if "data" in m["content"]}
    assert len(states) > 2, "the bar did not move"
    assert not any("widget" in mime for mime in cell.mime_types)


def test_a_flood_is_bounded_on_the_page_and_whole_in_a_file(shared_notebook: Kernel) -> None:
    pressed: list[float] = []

    def stop() -> None:
        pressed.append(time.monotonic())
        shared_notebook.interrupt()

    cell = shared_notebook.run(
        "%%distributed\ni = 0\nwhile True: print('x' * 200, rank, i); i += 1",
        timeout=60,
        actions=[(4, stop)],
    )
    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.ended - pressed[0] < 5
    saved = len(json.dumps(cell.outputs))
    assert saved < 1_000_000
    assert cell.wire_bytes < 2_000_000
    told = re.search(r"… ([\d,]+) lines left out; full text in (.*)", cell.text)
    assert told is not None
    lines = cell.text.splitlines()
    printed = [value(shared_notebook, f"cluster.pull('i', {rank})") for rank in (0, 1)]
    for rank in (0, 1):
        own = [line.rsplit(" ", 2) for line in lines if re.match(rf"\[(0-1|{rank})\] x", line)]
        assert own[0][1:] == [str(rank), "0"]
        whole = (Path(told[2]) / f"rank-{rank}.txt").read_text().splitlines()
        # the interrupt may have come in the middle of the last line
        numbers = [int(line.rsplit(" ", 1)[1]) for line in whole[:-1] if line.startswith("xxx")]
        assert numbers == list(range(len(numbers)))
        assert printed[rank] - len(numbers) <= 2
        assert int(own[-2][2]) >= len(numbers) - 3
    group_is_whole(shared_notebook)


def test_metrics_are_not_held_up_by_a_flood(shared_notebook: Kernel) -> None:
    shared_notebook.check(
        "import threading, time, nbdist.cluster\n"
        "cluster_ = nbdist.cluster.active(); delays_ = []\n"
        "def heard_():\n"
        "    run = cluster_.telemetry.current\n"
        "    if run is not None and 'sent' in run.values: delays_.append(time.time() - run.values['sent'])\n"
        "leave_ = cluster_.telemetry.subscribe(heard_)"
    )
    cell = shared_notebook.check(
        "%%distributed\nimport time\nend = time.time() + 3\ni = 0\n"
        "while time.time() < end:\n"
        "    print('x' * 200); i += 1\n"
        "    if i % 200 == 0: nbdist.log(sent=time.time())",
        timeout=60,
    )
    assert cell.seconds < 10
    shared_notebook.check("leave_()")
    delays = value(shared_notebook, "delays_")
    assert len(delays) > 5
    assert max(delays) < 2


def test_a_flood_that_ends_shows_its_end(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%distributed\nfor i in range(20_000): print(i)", timeout=60)
    lines = cell.text.splitlines()
    assert lines[0] == "[0-1] 0"
    assert [line for line in lines if line.endswith(" 19999")] in (["[0] 19999", "[1] 19999"], ["[0-1] 19999"])
    assert cell.seconds < 20


def test_large_values_are_cut_and_only_their_text_is_sent(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%distributed\nx = torch.full((1000, 1000), float(rank)); x")
    assert cell.wire_bytes < 50_000
    shown = {rank: "\n".join(x for x in cell.text.splitlines() if x.startswith(f"[{rank}]")) for rank in (0, 1)}
    assert "[0] tensor([[0., 0., 0.," in shown[0]
    assert "[1] tensor([[1., 1., 1.," in shown[1]
    cell = shared_notebook.check("%%distributed\n'y' * 100_000 + str(rank)")
    lines = cell.text.splitlines()
    assert [line[:4] for line in lines] == ["[0] ", "[1] "]
    assert all(len(line) <= 2048 + 4 for line in lines)
    assert cell.wire_bytes < 50_000


def test_output_none_shows_nothing_and_the_cell_ran(shared_notebook: Kernel) -> None:
    assert shared_notebook.check("%%distributed --output none\nprint('quiet'); quiet = 1\nquiet").text == ""
    assert shared_notebook.check("%%distributed\nquiet").text == "[0-1] 1\n"


def test_output_all_shows_every_line_under_its_rank(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%distributed --output all\nprint('same')")
    assert sorted(cell.text.splitlines()) == ["[0] same", "[1] same"]


def test_captured_output_is_not_on_the_page(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%capture captured\n%distributed print('hidden')")
    assert cell.text == ""
    assert "[0-1] hidden" in value(shared_notebook, "captured.stdout")


def test_a_warning_of_the_users_code_is_shown_once_for_all_ranks(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%distributed\nimport warnings\nwarnings.warn('look here')")
    assert cell.text.count("look here") <= 2  # the message and the source line, under [0-1]
    assert "[0-1]" in cell.text


def test_an_unprintable_value_is_an_error_with_its_name(shared_notebook: Kernel) -> None:
    fails(
        shared_notebook,
        "%%distributed\nclass Bad(Exception):\n    def __str__(self): raise ValueError('no')\nraise Bad",
    )
    group_is_whole(shared_notebook)
