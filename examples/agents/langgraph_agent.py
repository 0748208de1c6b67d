"""An agent as a graph of LangGraph: one node writes a draft, another one asks for it once more, and
an edge leads back while the two differ, up to three drafts. It prints the last one.

    uv venv venv && uv pip install --python venv langgraph langchain-openai
    OPENAI_BASE_URL=... OPENAI_API_KEY=... venv/bin/python langgraph_agent.py abc
"""

import os
import sys
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-5-nano"), max_retries=2)


class State(TypedDict):
    text: str
    drafts: list[str]


def write(state: State) -> dict[str, list[str]]:
    return {"drafts": [*state["drafts"], model.invoke(state["text"]).content]}


def is_settled(state: State) -> str:
    drafts = state["drafts"]
    return END if len(drafts) == 3 or drafts[-1] in drafts[:-1] else "write"


graph = StateGraph(State)
graph.add_node("write", write)
graph.add_edge(START, "write")
graph.add_conditional_edges("write", is_settled)
print(graph.compile().invoke({"text": sys.argv[1], "drafts": []})["drafts"][-1])
