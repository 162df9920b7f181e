"""The official OpenAI client, unchanged but for its base URL: one answer, one stream, and what a refusal looks like.

python examples/openai_client.py [http://127.0.0.1:8080] [KEY]
"""

import sys

from openai import APIStatusError, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
key = sys.argv[2] if len(sys.argv) > 2 else "none"

# The client retries twice by itself, and comes back when retry-after says.
client = OpenAI(base_url=f"{url}/v1", api_key=key)
question = "In one sentence: what is a forebay?"

try:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, max_tokens=40, messages=[{"role": "user", "content": question}]
    )
    print(f"{model}: {answer.choices[0].message.content}")

    for chunk in client.chat.completions.create(
        model=model, max_tokens=40, messages=[{"role": "user", "content": question}], stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
except APIStatusError as refused:
    reason = refused.response.headers.get("x-forebay-reason", "the engine's own")
    print(f"refused with {refused.status_code} ({reason}): {refused.message}", file=sys.stderr)
    sys.exit(1)
