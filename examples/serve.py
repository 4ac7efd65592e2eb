"""Serve a model behind OpenAI's HTTP interface with Ray Serve: one decoder per replica, and one replica per GPU.

pip install -e '.[serve]'
SPECGRAPH_API_KEY=secret python examples/serve.py --model examples/models/tiny-math/target
"""

import argparse
import contextlib
import gc
import hmac
import json
import os
from pathlib import Path
from typing import Any

import specgraph
from specgraph.config import load_config

try:
    import ray
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse, Response
    from openai_http import Chunks, FieldError, completion, described, lines, message, options, read_body, tools, usage
    from ray import serve
    from starlette.exceptions import HTTPException as AnyHTTPException
except ImportError as error:
    raise SystemExit("examples/serve.py needs Ray Serve; install it with pip install -e '.[serve]'.") from error

TEMPLATE = "{% for m in messages %}{% if m.role == 'user' %}Question: {% endif %}{{ m.content }}\n{% endfor %}Answer:"
"""For a model that has no chat template, such as tiny-math."""
app = FastAPI(openapi_url=None)


@app.exception_handler(AnyHTTPException)
@app.exception_handler(specgraph.SpecgraphError)
async def refuse(request: Request, error: Exception) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    status, body = described(error, getattr(request.state, "body", {}))
    return JSONResponse(body, status)


@serve.deployment(max_ongoing_requests=10_000)
@serve.ingress(app)
class Endpoint:
    """One decoder with one session, in which the sequences of all clients decode together."""

    def __init__(self, given: argparse.Namespace, key: str) -> None:
        import torch  # here, since the process that starts the server does not need it
        from transformers import AutoModelForCausalLM, AutoTokenizer

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = given.dtype or ("auto" if device == "cuda" else "float32")
        model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype)
        self.name, self.key = given.name or Path(given.model).resolve().name, key
        self.decoder = specgraph.compile_speculative(model.to(device), json.loads(given.config), draft=given.draft)
        self.tokenizer = AutoTokenizer.from_pretrained(given.model)
        self.tokenizer.chat_template = self.tokenizer.chat_template or TEMPLATE
        self.session = self.decoder.session(
            return_logprobs=True, return_text=True, tokenizer=self.tokenizer, max_waiting=given.max_waiting
        )
        gc.freeze()  # what is there stays, and a collection that looks through all of it would stop all clients

    def check_health(self) -> None:
        """Ray replaces this replica if its session is closed, as it is after an error that concerns all sequences."""
        assert self.session.capacity

    def check(self, request: Request) -> None:
        """Refuse whoever does not have the key."""
        said = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.key and not hmac.compare_digest(said.encode(), self.key.encode()):
            raise HTTPException(401, "The API key is wrong, or there is none; send it as Authorization: Bearer KEY.")

    @app.get("/v1/models")
    async def models(self, request: Request) -> dict[str, Any]:
        self.check(request)
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "specgraph"}]}

    @app.get("/stats")
    async def stats(self, request: Request) -> dict[str, Any]:
        """What the session has done, and how much of it is free."""
        self.check(request)
        return vars(self.session.stats) | vars(self.session.capacity)

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """An answer, whole or in chunks. Its sequence is submitted when the first event is asked for."""
        self.check(request)
        body = await read_body(request)
        if body["model"] != self.name:
            raise FieldError("model", f"There is no model {body['model']!r} here; it is {self.name!r}.", 404)
        from specgraph.runtime.requests.chats import encode_chats

        (prompt,) = encode_chats(self.tokenizer, [body["messages"]], tools(body), body.get("chat_template_kwargs"))
        events = self.session.follow(prompt, **options(body, prompt, self.decoder.max_length))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(contextlib.aclosing(events))
            first = await anext(events)  # an error up to here has a status of its own
            if body.get("stream"):
                stack.pop_all()
                return Chunks(events, lines(body, self.name, self.tokenizer, prompt, first, events))
            every = [first, *[event async for event in events]]
        if every[-1].error:
            raise every[-1].error
        said = message(body, every, self.tokenizer)
        return JSONResponse(completion(self.name, [said], usage=usage(prompt, every)))

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def elsewhere(self, request: Request, path: str) -> None:
        there = "POST /v1/chat/completions, GET /v1/models and GET /stats"
        raise HTTPException(404, f"There is no {request.method} /{path} here; there are {there}.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder of a causal LM")
    parser.add_argument("--name", help="what clients call it; the name of its folder if left out")
    parser.add_argument("--draft", help="the folder of a draft model or a head; n-gram lookup if left out")
    parser.add_argument("--dtype", help="the checkpoint's on a GPU, and float32 on a CPU, if left out")
    parser.add_argument("--config", default="{}", help='for the decoder, as JSON: {"max_batch_size": 32}')
    parser.add_argument("--max-waiting", type=int, default=256, help="requests that may wait for a row")
    parser.add_argument("--replicas", type=int, default=1, help="decoders, each with GPUs of its own if there are any")
    parser.add_argument("--host", default="127.0.0.1", help="other hosts can connect only if this is not the default")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


def check(given: argparse.Namespace) -> None:
    """Refuse in one sentence what every replica would refuse behind a traceback."""
    for name, folder in (("model", given.model), ("draft", given.draft or given.model)):
        if not (Path(folder) / "config.json").is_file():
            raise SystemExit(f"--{name} {folder} has no config.json; give the folder of a {name}.")
    try:
        load_config(json.loads(given.config))
    except ValueError as error:
        raise SystemExit(f"--config {given.config}: {error}") from None


def main() -> None:
    given, key = arguments(), os.environ.get("SPECGRAPH_API_KEY", "")
    if not key and given.host != "127.0.0.1":
        raise SystemExit(f"--host {given.host} lets others in, so SPECGRAPH_API_KEY must be set to a key.")
    check(given)
    ray.init(include_dashboard=False)
    serve.start(http_options={"host": given.host, "port": given.port})
    wanted = load_config(json.loads(given.config)).parallel.tensor
    gpus = {"num_gpus": wanted if ray.cluster_resources().get("GPU", 0) else 0}
    endpoint = Endpoint.options(num_replicas=given.replicas, ray_actor_options=gpus)
    serve.run(endpoint.bind(given, key), blocking=True)


if __name__ == "__main__":
    main()
