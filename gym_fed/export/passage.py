"""Texts that an export and its source are compared on. They are this project's own, so no model was trained on them."""

from __future__ import annotations

PROMPTS = (
    "The capital of France is",
    "double: abc",
    "Write one sentence about the sea.",
    "def add(a, b):\n    return",
)
"""Read as a user's message, in the chat template."""
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
