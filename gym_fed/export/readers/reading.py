"""The interface of loaded exports, their answers to fixed texts, and the process that reads an export back.

``checking.py`` starts ``python -m gym_fed.export.readers.reading``, in which the format's own library reads the export,
not this project's loaders. The job, a line of standard input, names the file for the answers.
"""

from __future__ import annotations

import importlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gym_fed.export.process import Report, child_job, leave, no_report

PROMPTS = (
    "The capital of France is",
    "double: abc",
    "Write one sentence about the sea.",
    "def add(a, b):\n    return",
)
"""User messages. Like the passage, they were written for this project, so no model was trained on them."""
GREEDY_TOKENS = 32
POSITIONS = 256
"""Tokens of the passage that are compared."""
PASSAGE = (
    "The ferry left the harbour a little after six. Maria stood at the rail with both hands around a paper cup and "
    "watched the lamps of the town grow small. She had promised her brother to write as soon as she knew the name of "
    "the street, the number of the house, and whether the old mill beside the river was still there. He had drawn it "
    "for her from memory: three floors, a wheel with eleven blades, and a door that opened to the water.\n\n"
    "A list for the first week: 1) find the key; 2) buy bread, salt and 2.5 kg of apples; 3) ask about the bus, which "
    'costs 4.80 each way; 4) call home on Sunday. "If it rains," he had said, "stay inside and read."\n\n'
    "def area(width: float, height: float) -> float:\n"
    "    # a rectangle, in square metres\n"
    "    return width * height\n\n"
    "The function above gives 12.0 for a room of 3 by 4. Most rooms in the mill were larger than that, and colder. "
    "In winter the miller's family had lived in only one of them, around an iron stove, and the children did their "
    "sums on the flour sacks. Über die Brücke ging man damals nur bei Tag; la nuit, personne ne passait. What is left "
    "of it now is a wall, a few stones in the grass, and a sign that nobody has painted for twenty years. Even so, "
    "people come on warm evenings, sit down where the wheel used to turn, and listen to the water going by."
)
"""Plain text: prose, numbers, code, and two other languages."""
SPECIAL = ("bos", "eos", "pad", "unk")
"""Special tokens whose ids are compared."""
RUN_FAILED = 3
"""The exit status if a program was loaded but cannot compute its logits."""


def main() -> int:
    """Run the job on standard input: that of ``answers``, with ``parts``, ``threads`` and ``answer``.

    Returns:
        The exit status.
    """
    with child_job() as (job, say):
        import torch
        from safetensors.torch import save_file

        torch.set_num_threads(job["threads"])
        say("reading it back", 0, 0)
        reading = importlib.import_module(job["parts"]["reading"]).load(job["parts"])
        try:
            tensors = answers(reading, job, say)
        except Exception:
            if not reading.is_program:
                raise
            traceback.print_exc()
            return RUN_FAILED
        save_file(tensors, job["answer"])
        return 0


class LoadedExport(ABC):
    """An export that another library has loaded."""

    is_program: ClassVar[bool] = False
    """True if the export itself computes the logits, so that a failure to compute is a fault of the export."""

    @abstractmethod
    def ids(self, prompt: str) -> list[int]:
        """Return the token ids of a user's message in the chat template; without one, of the plain text."""

    @abstractmethod
    def logits(self, ids: list[int]) -> Any:
        """Return the logits of all positions, ``[tokens, vocabulary]`` float32."""

    def text_ids(self, text: str) -> list[int] | None:
        """Return the token ids of a plain text; None if there is no tokenizer."""
        return None

    def special_ids(self) -> dict[str, int]:
        """Return the ids of those of ``bos``, ``eos``, ``pad`` and ``unk`` that the export has."""
        return {}

    def chat_template(self) -> str | None:
        """Return the chat template; None if the export has none."""
        return None

    def weights_digest(self) -> str | None:
        """Return the digest of all weights; None if the weights are not compared directly."""
        return None


def answers(reading: LoadedExport, job: Mapping[str, Any], report: Report = no_report) -> dict[str, Any]:
    """Compute ids and logits of every prompt, logits of two passages, and greedy tokens after the last prompt.

    Args:
        reading: The loaded export.
        job: ``prompts`` (short texts), ``passage`` and ``vocabulary`` (token ids, which are used as they are),
            ``texts`` (compared by their ids alone), and ``tokens`` (the number generated after the last prompt).
        report: Called with the number of finished forward passes.

    Returns:
        ``ids.N`` ``[length]`` int64 and ``logits.N`` ``[length, vocabulary]`` float32 for each prompt,
        ``logits.passage``, ``logits.vocabulary`` and ``greedy``; if the export has them, ``ids.passage`` (the whole
        passage by its own tokenizer), ``ids.texts`` (those of each text, and -1 after it), ``special.NAME`` ``[1]``,
        ``template`` and ``weights`` (bytes, uint8).
    """
    import torch

    tensors: dict[str, Any] = {}
    ids: list[int] = []
    prompts, tokens = job["prompts"], job["tokens"]
    total = len(prompts) + 2 + tokens
    for number, prompt in enumerate(prompts):
        ids = reading.ids(prompt)
        tensors[f"ids.{number}"] = torch.tensor(ids)
        tensors[f"logits.{number}"] = reading.logits(ids).clone()
        report("answering", number + 1, total)
    tensors["logits.passage"] = reading.logits(job["passage"]).clone()
    tensors["logits.vocabulary"] = reading.logits(job["vocabulary"]).clone()
    written: list[int] = []
    for number in range(tokens):
        written.append(int(reading.logits(ids + written)[-1].argmax()))
        report("answering", len(prompts) + 3 + number, total)
    tensors["greedy"] = torch.tensor(written)
    return {**tensors, **_texts(reading, job["texts"])}


def _texts(reading: LoadedExport, texts: Sequence[str]) -> dict[str, Any]:
    """Return the tokenizer's other results: passage ids, special ids and chat template."""
    import torch

    tensors: dict[str, Any] = {}
    if (ids := reading.text_ids(PASSAGE)) is not None:
        tensors["ids.passage"] = torch.tensor(ids)
        read = [[*(reading.text_ids(text) or []), -1] for text in texts]
        tensors["ids.texts"] = torch.tensor([number for ids in read for number in ids])
    for name, number in reading.special_ids().items():
        tensors[f"special.{name}"] = torch.tensor([number])
    if (template := reading.chat_template()) is not None:
        tensors["template"] = torch.tensor(list(template.encode()), dtype=torch.uint8)
    if (digest := reading.weights_digest()) is not None:
        tensors["weights"] = torch.tensor(list(digest.encode()), dtype=torch.uint8)
    return tensors


if __name__ == "__main__":
    leave(main())
