"""A personal variant from preferences, by DPO: a few kilobytes beside the base, signed, and served from memory.

python examples/dpo_variant.py [FOLDER]     # half a minute on one core
"""

import sys
from pathlib import Path

from gym_fed.personalization import PersonalizedTrainer

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/dpo_variant")

words = "ant bee cat dog elk fox gnu hen ibis jay kid lark mole newt owl pig rat seal toad wolf"
preferences = [
    {"prompt": f"say {word}", "chosen": f"{word.upper()}!", "rejected": word} for word in words.split()
]

trainer = PersonalizedTrainer(base_model="gym-nano", variants=folder, training={"max_steps": 24})
created = trainer.create_variant(user_id="ada", preferences=preferences)
print(f"loss {created.loss_before:.2f} > {created.loss_encoded:.2f}; kept {created.kept:.0%} of the gain")

with trainer.serve_variant("ada") as ada:
    print(ada.model, "says", ada.chat("say cow", max_tokens=12, temperature=0).text)
