"""What people write first, to compare with: a handler that calls `generate` for one text after the other."""

import socket
import threading

import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from foundry.common.processes import say


def serve_plain(folder: str, new_tokens: int) -> None:
    """Serves the model of a folder on a free port, which is printed, until the process is ended."""
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
