"""Write a batch script for Slurm."""

from __future__ import annotations

from gym_fed.training.launch.base import CHECKPOINT_SECONDS, PORT, ClusterJob, ClusterScheduler


class Slurm(ClusterScheduler):
    """A batch script with one task per machine, which starts the machine's processes.

    Before the time limit, Slurm signals the script; every task then writes a checkpoint, the job is queued again, and
    the run resumes.
    """

    name = "slurm"
    submit = "sbatch FILE"

    def text(self, job: ClusterJob) -> str:
        directives = [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={job.gpus}"] if job.gpus else [f"--cpus-per-task={job.nproc}"]),
            f"--signal=B:TERM@{CHECKPOINT_SECONDS}",
            "--requeue",
            "--open-mode=append",
            f"--output={job.name}-%j.log",
        ]
        header = "\n".join(f"#SBATCH {directive}" for directive in directives)
        command = job.command(f"$head:{PORT}")
        return _SCRIPT.format(header=header, command=command)


_SCRIPT = """#!/bin/bash
{header}
# The folder of this script, the model, the rows and the output folder must be on a disk that all machines share.
# Add the options that your cluster requires (--partition, --account, --time), and activate the environment of `gym`.
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
stopped=
trap 'stopped=yes; kill -TERM "$step"' TERM

srun --kill-on-bad-exit=1 {command} &
step=$!
code=0
wait "$step" || code=$?
if [ -n "$stopped" ]; then
    # The signal ended the first wait; this one lasts until the checkpoint is written.
    code=0
    wait "$step" || code=$?
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
