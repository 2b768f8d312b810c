"""Quickstart functions: train gym-nano, evaluate it, run a small federation and serve a variant.

::

    quickstart.train_tiny_model("my-model")
    quickstart.evaluate_model("my-model")

Each function prints the equivalent commands to standard error.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.child_process import run_process, start_process
from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.local_federation import (
    BIN,
    Command,
    Joiner,
    ask,
    hub_command,
    join_command,
    require_command,
    run_federation,
)

if TYPE_CHECKING:
    from gym_fed.training.run.result import TrainResult

CONTRIBUTORS = {
    "ada": "shout",
    "ben": "size",
    "cleo": "initial",
    "dan": "double",
    "eve": "dash",
    "fay": "vowels",
    "gus": "caesar",
    "hal": "twice",
}
"""Contributors of ``federate``, each with a task that gym-nano cannot do."""
_ROWS = 1200
_REHEARSAL = 0.5
_HELDOUT_ROWS = 24
_VARIANT_ROWS = 256
_ANSWER_TOKENS = 48
_ANSWER_SECONDS = 60.0


def train_tiny_model(
    output_dir: str | Path = "runs/tiny",
    task: str = "double",
    *,
    max_steps: int = 100,
    num_examples: int = 2000,
) -> TrainResult:
    """Train gym-nano on a new task. The model is returned in the result and saved in ``output_dir``.

    Args:
        output_dir: The run folder; a stopped run in it is resumed.
        task: A task from `gym data tasks`; ``double`` repeats every letter.
        max_steps: Optimiser steps of 32 rows; 100 take about half a minute on one core.
        num_examples: Number of rows to generate.

    Raises:
        GymError: ``FILE_EXISTS`` if ``output_dir`` contains a finished run.
    """
    from gym_fed.config.train.data_source import DataConfig
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.training.trainer import Trainer

    rows = json.dumps([{"tasks": [task], "num_examples": num_examples}])
    sizes = [f"--max-steps={max_steps}", "--per-device-train-batch-size=32", "--max-length=128"]
    where = ["--set", f"data={rows}", f"--output-dir={output_dir}"]
    _print_command(["gym", "train", "--model=gym-nano", *sizes, *where])
    config = TrainingConfig(
        model="gym-nano",
        data=[DataConfig(tasks=[task], num_examples=num_examples)],
        max_steps=max_steps,
        per_device_train_batch_size=32,
        max_length=128,
        output_dir=Path(output_dir),
    )
    return Trainer(config).train()


def evaluate_model(
    model: str | Path = "runs/tiny", task: str = "double", *, num_examples: int = 64
) -> dict[str, float]:
    """Measure a model's accuracy and loss on held-out rows of a task.

    Args:
        model: As for ``gym_fed.base.models.load_model``.
        task: As for ``train_tiny_model``.
        num_examples: Number of rows; ``train_tiny_model`` generates none of them.

    Returns:
        ``exact_match``, the share of correct answers, and ``loss``, in nats per token.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``.
    """
    from gym_fed.base.models import load_model
    from gym_fed.data.generated import generate
    from gym_fed.evaluation.generation import exact_match
    from gym_fed.evaluation.loss import heldout_loss

    _print_command(["gym", "data", "score", str(model), f"--task={task}", f"--num={num_examples}"])
    loaded = load_model(str(model))
    rows = generate(task, num_examples, split="heldout")
    return {
        "exact_match": exact_match(loaded.model, loaded.tokenizer, rows),
        "loss": heldout_loss(loaded.model, loaded.tokenizer, rows),
    }


@dataclass(frozen=True)
class LocalFederation:
    """Result of ``federate``.

    Attributes:
        folder: Folder of the hub, the contributors and the logs.
        model: Folder of the merged model.
        losses: Held-out loss before the first round and after each, in nats per token.
        credits: Credits by contributor.
        seconds: Duration of the rounds.
    """

    folder: Path
    model: Path
    losses: tuple[float, ...]
    credits: Mapping[str, int]
    seconds: float


def federate(
    contributors: int = 3,
    rounds: int = 2,
    output_dir: str | Path = "runs/federation",
    *,
    max_steps: int = 25,
) -> LocalFederation:
    """Run a hub and its contributors as processes on loopback, each with its own task, and merge what they learn.

    Args:
        contributors: 1 to 8.
        rounds: Number of rounds to wait for; two with three contributors take one to two minutes on two cores.
        output_dir: A new folder.
        max_steps: Optimiser steps of each contributor in each round.

    Raises:
        GymError: ``USAGE`` for numbers out of range; ``FILE_EXISTS`` if the folder exists; ``ROUND_ABORTED``.
    """
    from gym_fed.data.generated import generate_with_rehearsal
    from gym_fed.data.writing import write_rows

    if not 1 <= contributors <= len(CONTRIBUTORS) or rounds < 1:
        raise GymError(
            ErrorCode.USAGE,
            f"contributors={contributors}, rounds={rounds}: out of range",
            f"use 1 to {len(CONTRIBUTORS)} contributors and at least one round",
        )
    folder = Path(output_dir)
    if folder.exists():
        raise GymError(ErrorCode.FILE_EXISTS, f"{folder} already exists", "choose another output_dir")
    folder.mkdir(parents=True)
    tasks = dict(list(CONTRIBUTORS.items())[:contributors])
    _run([BIN / "gym-server", "init", "--dir", folder / "hub", "--enrolment", "open"])
    for name, task in tasks.items():
        file, seed = folder / f"{name}.jsonl", sum(map(ord, name))
        _print_generate([task], _ROWS, file, f"--rehearse={_REHEARSAL}", f"--seed={seed}")
        write_rows(file, generate_with_rehearsal([task], _ROWS, _REHEARSAL, seed=seed))
    heldout, known, num = folder / "hub" / "heldout.jsonl", list(tasks.values()), _HELDOUT_ROWS * contributors
    _print_generate(known, num, heldout, "--split=heldout")
    write_rows(heldout, generate_with_rehearsal(known, num, 0.0, split="heldout"))
    settings = _hub_settings(contributors, rounds, max_steps)
    _print_command(hub_command(folder, settings))

    def joiner(name: str) -> Joiner:
        def join(address: str, fingerprint: str) -> Command:
            command = join_command(folder, name, address, fingerprint)
            _print_command(command)
            return command

        return join

    def on_round(event: dict[str, Any]) -> None:
        err.print(str(event["text"]))
        if event["state"] != "committed":
            raise GymError(ErrorCode.ROUND_ABORTED, str(event["text"]), f"the logs are in {folder}")

    seconds = run_federation(folder, {name: joiner(name) for name in tasks}, on_round, settings=settings)
    model = folder / "model"
    _run([BIN / "gym-server", "model", model, "--dir", folder / "hub"])
    merged_rounds = ask(folder, "rounds")
    credits = {account["name"]: account["balance"] for account in ask(folder, "status")["contributors"]}
    losses = (merged_rounds[0]["heldout_before"], *(merged["heldout_after"] for merged in merged_rounds))
    return LocalFederation(folder, model, losses, credits, seconds)


def _hub_settings(contributors: int, rounds: int, max_steps: int) -> list[str]:
    """Return overrides of the hub's config for small, quick rounds without malicious contributors."""
    return [
        "listen=127.0.0.1:0",
        f"rounds.num_rounds={rounds}",
        f"rounds.min_contributors={contributors}",
        f"recipe.max_steps={max_steps}",
        "recipe.learning_rate=5.0e-4",
        "recipe.per_device_train_batch_size=16",
        "recipe.max_length=96",
        "soup.aggregator=mean",
        "soup.num_malicious_nodes=0",
        "gate.heldout=heldout.jsonl",
        "gate.max_length=96",
        "gate.max_loss_increase=0.3",
        "gate.max_update_loss_increase=0.3",
    ]


class VariantServer:
    """A running `gym api` process. Use it as a context manager, or call ``close``; it never outlives this process.

    Attributes:
        url: Base URL for OpenAI-compatible clients: ``http://127.0.0.1:PORT/v1``.
        model: The variant's model name in the API.
    """

    def __init__(self, command: Command, model: str) -> None:
        """Start the server; use ``serve_variant`` instead of calling this."""
        require_command(command)
        self._process = start_process(
            command, passphrases=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise GymError(ErrorCode.UNAVAILABLE, "gym api did not start", "see its error above")
        self.url: str = json.loads(line)["url"]
        self.model = model

    def ask(self, text: str, *, max_tokens: int = _ANSWER_TOKENS) -> str:
        """Return the variant's greedy answer to a user message.

        Raises:
            GymError: ``UNAVAILABLE`` if the server returns an error or does not answer.
        """
        import httpx

        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        try:
            answer = httpx.post(f"{self.url}/chat/completions", json=body, timeout=_ANSWER_SECONDS)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise GymError(
                ErrorCode.UNAVAILABLE, f"{self.url}: {error}", "serve the variant again"
            ) from error
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def close(self) -> None:
        """Stop the server. Repeated calls have no effect."""
        self._process.communicate()

    def __enter__(self) -> VariantServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_variant(
    user: str = "ada", task: str = "shout", store: str | Path = "runs/variants", *, max_steps: int = 40
) -> VariantServer:
    """Create a small variant of gym-nano, unless it is in the store already, and serve it together with its base.

    Args:
        user: The variant's owner, and its name.
        task: The task to learn, as for ``train_tiny_model``.
        store: Folder of the variants.
        max_steps: Optimiser steps.

    Raises:
        GymError: Errors of ``PersonalizedTrainer.create_variant``; ``UNAVAILABLE`` if the server does not start.
    """
    from gym_fed.data.generated import generate
    from gym_fed.data.writing import write_rows

    folder = Path(store)
    folder.mkdir(parents=True, exist_ok=True)
    if user not in _variants(folder):
        data = folder.parent / f"{folder.name}-{user}.jsonl"
        _print_generate([task], _VARIANT_ROWS, data)
        write_rows(data, generate(task, _VARIANT_ROWS), overwrite=True)
        options: Command = ["--data", data, "--user", user, "--steps", str(max_steps), "--store", folder]
        _run([BIN / "gym", "variant", "create", *options])
    command: Command = [BIN / "gym", "api", "--variants", folder, "--port", "0"]
    _print_command(command)
    return VariantServer([*command, "--json", "--until-eof"], f"gym-nano:{user}")


def _variants(store: Path) -> set[str]:
    from gym_fed.serving.store.store import VariantStore

    with VariantStore.open(store) as variants:
        return set(variants.names())


def _print_generate(tasks: list[str], num: int, file: Path, *more: str) -> None:
    named = [f"--task={task}" for task in tasks]
    _print_command(["gym", "data", "generate", *named, f"--num={num}", *more, file])


def _print_command(command: Command) -> None:
    """Print a command as it would be typed."""
    words = [Path(command[0]).name, *map(str, command[1:])]
    err.print(f"$ {shlex.join(words)}", style="dim")


def _run(command: Command) -> None:
    """Run a command, and raise the error that it reports."""
    _print_command(command)
    require_command(command)
    done = run_process([*command, "--json"], passphrases=True, stdin=None, text=True)
    if done.returncode:
        raise GymError.last_in(done.stderr) or GymError(
            ErrorCode.INTERNAL, f"{command[0]} exited with code {done.returncode}"
        )
