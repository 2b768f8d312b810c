"""Serve a variant beside its base, and talk to both with OpenAI's own client.

pip install openai
python examples/serve.py [FOLDER]     # half a minute on one core
"""

import sys

from openai import OpenAI

from gym_fed import quickstart

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/examples/serve"

with quickstart.serve_variant(user="ada", task="shout", store=folder) as server:
    client = OpenAI(base_url=server.url, api_key="not needed on this machine")
    print([model.id for model in client.models.list()])
    for model in ("gym-nano", server.model):
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "shout: stone"}],
            max_tokens=16,
            temperature=0,
            stream=True,
        )
        print(model, "says", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
