"""A scheduler that is none: sbatch, srun and scontrol as a job script sees them, with tasks on this machine.

A job has a node for each task, all of which are this machine. At its time limit the tasks get SIGTERM, as by
`--signal=TERM@300`; a job that was put back in the queue starts again when the one before has ended.
"""

import json
import os
import sys
from pathlib import Path

_SBATCH = r'''#!{python}
"""Reads the #SBATCH lines of a script, and runs it as often as it is put back in the queue."""
import json, os, subprocess, sys
words, script = sys.argv[1:], None
nodes = 1
while words:
    word = words.pop(0)
    if word == "--nodes":
        nodes = int(words.pop(0))
    else:
        script = word
        break
options = [line.split(" ", 1)[1].strip() for line in open(script) if line.startswith("#SBATCH ")]
told = dict(each.lstrip("-").partition("=")[::2] for each in options)
state = "{state}"
jobs = []
for start in range({most}):
    if os.path.exists(state + "/requeued"):
        os.remove(state + "/requeued")
    environment = dict(os.environ)
    environment |= {{
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": told["job-name"],
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "localhost[1-%d]" % nodes,
        "SLURM_NTASKS_PER_NODE": told["ntasks-per-node"],
        "SLURM_GPUS_PER_NODE": "{processes}",
        "SLURM_RESTART_COUNT": str(start),
        "FAKE_SIGNAL": told["signal"],
        "FAKE_TIME": "{limit}" if start == 0 else "0",
    }}
    status = subprocess.run(["bash", script, *words], env=environment).returncode
    jobs.append(status)
    if not os.path.exists(state + "/requeued"):
        break
json.dump({{"jobs": jobs, "options": options}}, open(state + "/jobs.json", "w"))
'''

_SRUN = r'''#!{python}
"""Runs the command once on each node, and sends all of them the signal at the limit."""
import os, signal, subprocess, sys, time
tasks = []
for number in range(int(os.environ["SLURM_NNODES"])):
    environment = os.environ | {{
        "SLURM_PROCID": str(number),
        "SLURM_NODEID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": os.environ["SLURM_NNODES"],
        "SLURMD_NODENAME": "localhost",
    }}
    tasks.append(subprocess.Popen(sys.argv[1:], env=environment, start_new_session=True))
name, _, _ = os.environ["FAKE_SIGNAL"].partition("@")
mark = os.environ["FAKE_TIME"]
sent = mark == "0"
until = time.monotonic() + {seconds}
try:
    while any(task.poll() is None for task in tasks):
        if not sent and os.path.isdir(mark):
            sent = True
            for task in tasks:
                task.send_signal(getattr(signal, "SIG" + name))
        if time.monotonic() > until:
            sys.exit("the tasks took too long")
        time.sleep(0.02)
finally:
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, signal.SIGKILL)
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
'''

_SCONTROL = r'''#!{python}
"""The hosts of a list of nodes, all of which are this one; and a job back into the queue."""
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    first, last = sys.argv[3].partition("[")[2].rstrip("]").split("-")
    print("\n".join("localhost" for _ in range(int(first), int(last) + 1)))
elif sys.argv[1] == "requeue":
    assert sys.argv[2] == os.environ["SLURM_JOB_ID"], sys.argv
    open("{state}/requeued", "w").close()
else:
    sys.exit("scontrol: " + " ".join(sys.argv[1:]) + " is not known here")
'''


def install(
    folder: Path, *, limit_reached: Path, processes: int, most: int = 3, seconds: float = 120.0
) -> dict[str, str]:
    """The programs in a folder, and the environment in which they are found. The first job has reached its
    limit when the folder `limit_reached` is there."""
    values = {
        "python": sys.executable,
        "state": str(folder),
        "limit": str(limit_reached),
        "processes": str(processes),
        "most": most,
        "seconds": seconds,
    }
    tools = folder / "bin"
    tools.mkdir(parents=True)
    for name, text in (("sbatch", _SBATCH), ("srun", _SRUN), ("scontrol", _SCONTROL)):
        (tools / name).write_text(text.format(**values))
        (tools / name).chmod(0o755)
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join((str(tools), str(Path(sys.executable).parent), os.environ["PATH"]))
    sources = os.pathsep.join((str(root / "src"), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PATH": path, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}


def jobs(folder: Path) -> dict[str, list[object]]:
    """The statuses of the jobs, and the options that the scheduler was given."""
    found: dict[str, list[object]] = json.loads((folder / "jobs.json").read_text())
    return found
