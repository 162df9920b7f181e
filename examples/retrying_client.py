"""A client that behaves well under overload, in plain Python: it returns when it was told to, and gives up in time.

python examples/retrying_client.py http://127.0.0.1:8080 "What is a forebay?" [PATIENCE_S]

Three rules make the difference between one wave of refusals and a storm of retries:
- retry only what can work (`x-should-retry`), and only when it was said to (`retry-after-ms`, `retry-after`);
- say how long you will wait (`x-forebay-deadline-ms`): a longer wait is then refused at once, not served late;
- keep a budget of time for all tries together, not for each.
"""

import http.client
import json
import sys
import time
from urllib.parse import urlsplit


def ask(host: str, question: str, patience_s: float) -> str:
    """The answer, or RuntimeError when there was none in time. The patience is for all tries together."""
    deadline = time.monotonic() + patience_s
    body = {"model": first_model(host), "max_tokens": 60, "messages": [{"role": "user", "content": question}]}
    while (left_s := deadline - time.monotonic()) > 0:
        connection = http.client.HTTPConnection(host, timeout=left_s)
        headers = {"content-type": "application/json", "x-forebay-deadline-ms": str(int(left_s * 1000))}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        if response.status == 200:
            return str(answer["choices"][0]["message"]["content"])
        error = answer["error"]["message"]
        if response.getheader("x-should-retry") != "true":
            raise RuntimeError(f"{response.status}: {error}")
        wait_s = int(response.getheader("retry-after-ms") or 1000) / 1000
        if wait_s >= deadline - time.monotonic():
            raise RuntimeError(f"{response.status}: {error} (that would be in {wait_s:.1f} s, too late)")
        print(f"refused ({response.getheader('x-forebay-reason')}), back in {wait_s:.1f} s", file=sys.stderr)
        time.sleep(wait_s)
    raise RuntimeError(f"no answer within {patience_s:g} s")


def first_model(host: str) -> str:
    """The first model that the engines list."""
    connection = http.client.HTTPConnection(host, timeout=5)
    connection.request("GET", "/v1/models")
    models = json.loads(connection.getresponse().read())
    connection.close()
    return str(models["data"][0]["id"])


if __name__ == "__main__":
    address, prompt, *patience = sys.argv[1:]
    try:
        print(ask(urlsplit(address).netloc, prompt, float(patience[0]) if patience else 30.0))
    except RuntimeError as failure:
        sys.exit(f"no answer: {failure}")
