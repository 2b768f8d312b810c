"""Write a task for SkyPilot."""

from __future__ import annotations

from gym_fed.training.launch.base import PORT, ClusterJob, ClusterScheduler, yaml_text
from gym_fed.version import __version__


class SkyPilot(ClusterScheduler):
    """A task that copies the working folder to every machine; the output folder should be a mounted bucket."""

    name = "skypilot"
    submit = "sky jobs launch FILE"

    def text(self, job: ClusterJob) -> str:
        command = job.command(f"$head:{PORT}")
        run = f'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n{command}\n'
        task = {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": {"accelerators": f"H100:{job.gpus}"} if job.gpus else {"cpus": f"{job.nproc}+"},
            "workdir": ".",
            "setup": f"pip install 'gym-fed[train]=={__version__}'\n",
            "run": run,
        }
        return _HEADER + yaml_text(task)


_HEADER = """# The machines do not share a disk: mount a bucket (file_mounts, mode: MOUNT) and set output_dir in it,
# so that a run resumes on other machines. Set the accelerator that you want.
"""
