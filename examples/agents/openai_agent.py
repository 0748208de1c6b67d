"""An agent on the openai package, which knows nothing of training: it asks twice, a third time if
the answers differ, and prints the one that it has got most often.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python openai_agent.py abc
"""

import os
import sys
from collections import Counter

from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY


def ask(prompt: str) -> str:
    stream = client.chat.completions.create(
        model=os.environ.get("OPENAI_MODEL", "gpt-5-nano"),
        messages=[{"role": "user", "content": prompt}],
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


answers = [ask(sys.argv[1]), ask(sys.argv[1])]
if len({*answers}) > 1:
    answers.append(ask(sys.argv[1]))
print(Counter(answers).most_common(1)[0][0])
