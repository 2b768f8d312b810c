"""LangChain on a server of ours: `gym api` speaks OpenAI's API, so ChatOpenAI needs a base_url and nothing else.

pip install langchain-openai
python examples/langchain_chat.py [FOLDER]     # half a minute on one core
"""

import os
import sys

from gym_fed import quickstart

os.environ["LANGSMITH_TRACING"] = "false"  # nothing is sent anywhere but to this machine
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/examples/langchain"

with quickstart.serve_variant(user="ada", task="shout", store=folder) as server:
    chat = ChatOpenAI(base_url=server.url, api_key="none", model=server.model, temperature=0, max_tokens=16)
    chain = ChatPromptTemplate.from_messages([("user", "shout: {word}")]) | chat
    for word in ("stone", "river"):
        print(word, "->", chain.invoke({"word": word}).content)
    print("streamed:", "".join(str(chunk.content) for chunk in chain.stream({"word": "cloud"})))
