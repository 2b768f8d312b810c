"""A Hugging Face Space on a CPU: chat with gym-nano and its variants, the demo federation's board, an evaluation.

    pip install -r requirements-app.txt && python app.py

While the page is open to all, processes beside it train three variants and run the demo's federation; the page shows
each as soon as it is there. What was made lies in the folder ``GYM_SPACE`` (``runs/space``) and is used again;
``GYM_SPACE_MAKES=0`` makes nothing.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
os.environ |= {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}
if find_spec("gym_server") is None:  # a Space installs the requirements, and not the repository that it is
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(ROOT)], check=True)
    importlib.invalidate_caches()

import gradio as gr
import gym_server  # noqa: F401  (sets Flower's variables)
from gym_server.cli.show import rounds_of
from gym_server.federation import Federation

from gym_fed.config.serving import EngineConfig, ServingConfig
from gym_fed.core.errors import GymError
from gym_fed.data.generated import generate
from gym_fed.data.writing import write_rows
from gym_fed.evaluation.evaluator import Evaluator, Progress
from gym_fed.evaluation.scoring.models import ModelRequest
from gym_fed.serving.chat.local_writer import LocalWriter
from gym_fed.serving.chat.session import ChatSession
from gym_fed.serving.setup import Serving, open_serving
from gym_fed.serving.store.store import VariantStore

FOLDER = Path(os.environ.get("GYM_SPACE") or ROOT / "runs" / "space").resolve()
STORE, DEMO = FOLDER / "variants", FOLDER / "demo"
BASE = "gym-nano"
VARIANTS = {"ada": "shout", "ben": "size", "cleo": "initial"}
"""Whose each variant is, and the task that it adds to what gym-nano can do; a variant is named after its task."""
COMMUNITY = "community"
"""The variant that the federation makes: what all of its contributors know."""
STEPS, ROWS = 60, 400
MOST_CHARACTERS = 400
"""Of a message: gym-nano answers a line."""
EXAMPLES = ["copy: hello", "reverse: hello", "shout: hello", "size: hello", "initial: hello"]
COLUMNS = ["round", "contributor", "verdict", "credit", "reason"]
THEME = gr.themes.Monochrome(
    primary_hue="neutral",
    secondary_hue="neutral",
    neutral_hue="neutral",
    font=["ui-sans-serif", "system-ui", "sans-serif"],  # of the reader's machine, so that none is fetched
    font_mono=["ui-monospace", "Consolas", "monospace"],
)
ABOUT = """# gym-fed
A community improves one language model together. `gym-nano` has 1 M weights and answers one-line tasks such as
`reverse: hello`. It cannot `shout:`, `size:` or `initial:`. Each variant adds one of these as a small delta on the
same base; the federation's model learned all three, and nobody sent data."""


# ---- what is made beside the page ----


class Making:
    """Makes variants and federation in processes, one after the other, unless they are there.

    Attributes:
        doing: What is being made, for people; empty when all is there.
    """

    def __init__(self) -> None:
        self.doing = ""

    def start(self) -> None:
        """In a thread that ends with this process."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        try:
            for user, task in VARIANTS.items():
                if task not in variants():
                    self.doing = f"training {user}'s variant"
                    self._make_variant(user, task)
            if not (DEMO / "result.json").exists():
                self.doing = "running the federation: five rounds, some minutes"
                _command("-m", "demo.run", str(DEMO))
            if COMMUNITY not in variants():
                self.doing = "adding the federation's model"
                delta = FOLDER / f"{COMMUNITY}.gymdelta"
                merged = str(DEMO / "merged")
                _gym("delta", "encode", BASE, merged, "--codec", "int8", "--output", str(delta))
                _gym(
                    "variant",
                    "add",
                    str(delta),
                    "--name",
                    COMMUNITY,
                    "--user",
                    COMMUNITY,
                    "--store",
                    str(STORE),
                )
            self.doing = ""
        except subprocess.CalledProcessError as error:
            self.doing = f"stopped: {error.cmd[2]} failed; its output is in the log of the Space"

    def _make_variant(self, user: str, task: str) -> None:
        rows = FOLDER / f"{user}.jsonl"
        write_rows(rows, generate(task, ROWS, seed=sum(map(ord, user))), overwrite=True)
        wanted = ["--user", user, "--name", task, "--steps", str(STEPS), "--store", str(STORE)]
        _gym("variant", "create", "--data", str(rows), *wanted)


def _gym(*words: str) -> None:
    _command("-m", "gym_fed.cli.main", *words)


def _command(*words: str) -> None:
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


making = Making()


# ---- chat ----


@cache
def serving() -> Serving:
    """The base in memory, and its variants as they come."""
    VariantStore.open(STORE).close()  # makes it
    return open_serving(
        ServingConfig(base=BASE, variants=STORE, device="cpu", engine=EngineConfig(max_concurrent=4))
    )


def variants() -> list[str]:
    """Names of the variants so far."""
    store = serving().store
    return [] if store is None else sorted(record.name for record in store.list())


def chat(message: str, history: list[dict[str, Any]], model: str) -> Iterator[str]:
    """The answer of a model, as it grows; each line is a question of its own for gym-nano."""
    parts = serving()
    writer = LocalWriter(
        parts.service, base=parts.served_name, tokenizer=parts.tokenizer, context=parts.engine.limits.context
    )
    writer.variants = variants
    said = ""
    try:
        session = ChatSession(
            writer, variant=None if model == BASE else model, sampling={"temperature": 0, "max_tokens": 64}
        )
        with closing(session.say(message[:MOST_CHARACTERS])) as texts:
            for text in texts:
                said += text
                yield said
    except GymError as error:
        raise gr.Error(error.message, print_exception=False) from error


def choices(chosen: str) -> Any:
    """The list of models, with what was chosen."""
    return gr.Dropdown(choices=[BASE, *variants()], value=chosen)


# ---- board ----


def board() -> tuple[str, list[list[str]], Any]:
    """A line on the federation, a row for every verdict, and the held-out loss by round."""
    import pandas

    rounds: list[dict[str, Any]] = []
    if (DEMO / "hub" / "hub.db").exists():
        with Federation.open(DEMO / "hub", read_only=True) as fed:
            rounds = rounds_of(fed)
    rows = [
        [str(line["server_round"]), one["name"], one["verdict"], str(one["credit"]), one["reason"]]
        for line in reversed(rounds)
        for one in sorted(line["updates"], key=lambda one: str(one["name"]))
    ]
    losses = [
        (line["server_round"], line["heldout_after"]) for line in rounds if line["heldout_after"] is not None
    ]
    if rounds and losses:
        before = next(line["heldout_before"] for line in rounds if line["heldout_before"] is not None)
        losses.insert(0, (0, before))
        change = f"{before:.3f} to {losses[-1][1]:.3f}"
        text = f"**{len(losses) - 1} rounds committed**, held-out loss {change} nats per token."
    else:
        text = "**No round yet.**"
    note = f" Now: {making.doing}." if making.doing else ""
    return text + note, rows, pandas.DataFrame(losses, columns=["round", "held-out loss"])


# ---- evaluation ----


def evaluate(chosen: list[str], progress: gr.Progress = gr.Progress()) -> list[list[str]]:
    """Scores of the suite ``tiny``; what was evaluated before is read from its record."""

    def show(found: Progress) -> None:
        progress((found.done, found.total), desc=found.task or None)

    if not chosen:
        raise gr.Error("Choose a model.", print_exception=False)
    request = ModelRequest(
        BASE, variants=tuple("base" if one == BASE else one for one in chosen), store=STORE
    )
    try:
        found = Evaluator(
            ["tiny"], request, num_examples=20, out=FOLDER / "evals", on_progress=show
        ).run_all()
    except GymError as error:
        raise gr.Error(error.message, print_exception=False) from error
    rows = []
    for model, results in found.items():
        for name, task in results.tasks.items():
            figure = task.figures[task.main_metric]
            error_text = "" if figure.stderr is None else f"{figure.stderr:.3f}"
            rows.append([model, name, task.main_metric, f"{figure.value:.3f}", error_text])
    return rows


# ---- the page ----


def page() -> gr.Blocks:
    """Three tabs."""
    with gr.Blocks(title="gym-fed", analytics_enabled=False) as blocks:
        gr.Markdown(ABOUT)
        tick = gr.Timer(5)
        with gr.Tab("Chat"):
            model = gr.Dropdown([BASE], value=BASE, label="Model")
            gr.ChatInterface(
                chat,
                additional_inputs=[model],
                chatbot=gr.Chatbot(label="Answers", height=360, buttons=["copy", "copy_all"]),
                textbox=gr.Textbox(placeholder="shout: hello", max_length=MOST_CHARACTERS, label="Message"),
                examples=[[text] for text in EXAMPLES],
                run_examples_on_click=False,
                cache_examples=False,
                analytics_enabled=False,
            )
        with gr.Tab("Federation"):
            line = gr.Markdown()
            losses = gr.LinePlot(x="round", y="held-out loss", height=220)
            verdicts = gr.Dataframe(headers=COLUMNS, interactive=False, wrap=True)
        with gr.Tab("Evaluation"):
            gr.Markdown("The suite `tiny`, 20 rows of each task, by the project's own engine.")
            chosen = gr.CheckboxGroup([BASE], value=[BASE], label="Models")
            begin = gr.Button("Evaluate", variant="primary")
            scores = gr.Dataframe(headers=["model", "task", "metric", "value", "stderr"], interactive=False)
        gr.on([blocks.load, tick.tick], board, outputs=[line, verdicts, losses], show_progress="hidden")
        gr.on([blocks.load, tick.tick], choices, model, model, show_progress="hidden")
        gr.on(
            [blocks.load, tick.tick],
            lambda ticked: gr.CheckboxGroup(choices=[BASE, *variants()], value=ticked),
            chosen,
            chosen,
            show_progress="hidden",
        )
        begin.click(evaluate, chosen, scores, concurrency_limit=1)
    return blocks


if __name__ == "__main__":
    serving()
    if os.environ.get("GYM_SPACE_MAKES") != "0":
        making.start()
    page().queue(max_size=20).launch(theme=THEME, ssr_mode=False, footer_links=[], show_error=False)
