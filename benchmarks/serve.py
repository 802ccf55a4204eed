"""Answers a second of a server, beside those of a plain handler: `python -m benchmarks serve --model FOLDER`."""

import contextlib
import http.client
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from features import BACKENDS, FORMATS
from foundry.common.errors import UserError
from foundry.common.machine import adds_int8_exactly, end_with_parent
from foundry.common.reports import PROJECT, aligned_cells
from foundry.common.terminal import say
from foundry.corpora.tokenizers import load_tokenizer, train_tokenizer
from foundry.model_t5 import build_config, create_model
from foundry.modeling.int8 import multiplies_int8

CLIENTS = (1, 8, 64)
NEW_TOKENS = 32  # most of an answer
PLAIN = "import sys; from benchmarks.serve import serve_plain; serve_plain(sys.argv[1], int(sys.argv[2]))"
VOCABULARY = 8000  # of a model of random weights


def made_texts(count: int) -> list[str]:
    """Texts of 4 to 40 made-up words: log-normal lengths, as of messages."""
    chooser = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
    words = ["".join(chooser.choices(syllables, k=chooser.randint(1, 4))) for _ in range(20_000)]
    return [" ".join(chooser.choices(words, k=min(40, 4 + int(chooser.lognormvariate(2, 0.7))))) for _ in range(count)]


def texts_of(args: Namespace) -> list[str]:
    """The sources: the first lines of --train_file, or made-up ones."""
    if not args.train_file:
        return made_texts(args.examples)
    with Path(args.train_file[0]).open(encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line][: args.examples]


def model_folder(args: Namespace, texts: list[str], folder: Path) -> Path:
    """The folder that --model names, or one with a model of this shape and random weights."""
    if Path(args.model).is_dir():
        return Path(args.model)
    train_tokenizer([*texts, *made_texts(5000)], folder, VOCABULARY)
    config = build_config(args.model, len(load_tokenizer(str(folder))))
    create_model(config).save_pretrained(folder)
    return folder


def serve_plain(folder: str, new_tokens: int) -> None:
    """What people write first, to compare with: a handler that calls `generate` for one text after the other. Serves on
    a free port, which is printed, until the process is ended."""
    import uvicorn
    from fastapi import FastAPI

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    app, turn, place = FastAPI(), threading.Lock(), socket.create_server(("127.0.0.1", 0))

    @torch.no_grad()
    def answered(text: str) -> str:
        written = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=new_tokens)
        return tokenizer.decode(written[0], skip_special_tokens=True)

    @app.post("/v1/completions")
    def complete(body: dict) -> dict:
        with turn:
            return {"choices": [{"text": answered(body["prompt"])}]}

    say(f"the server answers at http://127.0.0.1:{place.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[place])


@contextlib.contextmanager
def started(*words: object) -> Iterator[int]:
    """The port of a server that this command of Python starts; it is ended with the `with` block."""
    command = [sys.executable, *map(str, words)]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, cwd=PROJECT, preexec_fn=end_with_parent, **streams)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"answers at http://\S*:(\d+)", line):
                threading.Thread(target=process.stdout.read, daemon=True).start()  # so that the pipe is never full
                yield int(found[1])
                return
        raise UserError(f"{' '.join(command)}: did not start: {''.join(lines)[-500:]}")
    finally:
        process.terminate()
        process.wait(60)


def asked(port: int, clients: int, texts: list[str]) -> dict:
    """The figures of so many clients, each of which asks for one text after the other on a connection of its own."""
    here = threading.local()

    def connect() -> None:
        here.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def ask(text: str) -> float:
        began, body = time.perf_counter(), json.dumps({"prompt": text})
        here.connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = here.connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise UserError(f"the server answered {response.status}: {answer.decode()}")
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(clients, initializer=connect) as pool:
        found = sorted(pool.map(ask, texts))
    took = time.perf_counter() - began
    return {
        "clients": clients,
        "answers_per_s": len(found) / took,
        "median_ms": 1000 * statistics.median(found),
        "p99_ms": 1000 * found[min(len(found) - 1, int(0.99 * len(found)))],
    }


def measure_serve(args: Namespace) -> dict:
    """{"rows": a server and a number of clients in each, "ratio": answers a second of our server with PyTorch over
    those of the plain handler, with most clients}."""
    texts, rows = texts_of(args), []
    with tempfile.TemporaryDirectory() as place:
        folder = model_folder(args, texts, Path(place, "model"))
        ours = ["predict_t5.py", "--serve", "--use_cpu", "--port", 0, "--max_new_tokens", NEW_TOKENS]
        servers = {"plain handler": ["-c", PLAIN, folder, NEW_TOKENS]}
        servers["transformers"] = [*ours, "--model_name_or_path", folder, "--num_beams", 1]
        if multiplies_int8(torch.device("cpu")):
            servers["transformers, int8"] = [*servers["transformers"], "--int8"]
        kinds = {name: name for name in sorted(BACKENDS.keys() & FORMATS.keys())}
        if adds_int8_exactly():  # else the engine computes in float32
            kinds["ctranslate2_int8"] = "ctranslate2"
        for kind, backend in kinds.items():
            words = ["export_checkpoint.py", "--model_name_or_path", folder, "--output_dir", Path(place, kind)]
            words += ["--formats", kind]
            done = subprocess.run([sys.executable, *map(str, words)], cwd=PROJECT, capture_output=True, text=True)
            if done.returncode:
                rows.append({"name": kind, "error": done.stderr.strip().rpartition("\n")[2]})
            else:
                servers[kind] = [*ours, "--num_beams", 1, "--backend", backend]
                servers[kind] += ["--model_name_or_path", Path(place, kind)]
        for name, words in servers.items():
            try:
                with started(*words) as port:
                    asked(port, 1, texts[:8])  # warm
                    for clients in CLIENTS:
                        rows.append({"name": name, "ours": name != "plain handler"} | asked(port, clients, texts))
            except UserError as error:  # its packages are not there
                rows.append({"name": name, "error": str(error).rpartition("error: ")[2].strip()})
    rates = {row["name"]: row["answers_per_s"] for row in rows if row.get("clients") == CLIENTS[-1]}
    heads = ["name", "clients", "answers_per_s", "median_ms", "p99_ms", "error"]
    cells = [[row.get(head, "") for head in heads] for row in rows]
    shown = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in line] for line in [heads, *cells]]
    return {"rows": rows, "ratio": rates["transformers"] / rates["plain handler"], "text": aligned_cells(shown)}
