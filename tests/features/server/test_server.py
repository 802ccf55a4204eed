"""predict_t5.py --serve: the answers are those of predict_t5.py, in OpenAI's shape, whoever asks beside."""

import contextlib
import gc
import http.client
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import openai
import psutil
import test_ensemble
import torch
import zoo
from absl.testing import parameterized
from helpers import run_main
from loaded_libraries import command_that_lists, loaded_in_vain
from test_predict_t5 import BACKENDS, TestCase, plain_answers, workspace
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import constants
import predict_t5
from features.server import app as server
from features.server import completions
from features.server.waiting_texts import Counters, TextBatches, WaitingText
from foundry.corpora.tokenizers import decoded, load_tokenizer
from foundry.model_t5 import load_model
from foundry.modeling import decoding
from foundry.modeling.found_answers import AnswerFinder

ROOT = Path(constants.__file__).parent

JSON = {"Content-Type": "application/json"}
TEXTS = ["old fox number 7", "yes no", "very very very old fox number 7 answer 3", "a", "fox", "answer 3 yes no"]


class Served:
    """A server in this process, its address, and plain HTTP to it."""

    def __init__(self, service: server.Service, port: int):
        self.service, self.port = service, port

    def ask(self, path: str, body: object = None, method: str = "POST", **headers: str) -> tuple[int, dict | str]:
        """(status, content). body: of an Iterator the parts are sent in chunks; None: nothing is sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | Iterator | None) else json.dumps(body).encode()
        if body is None:
            method = "HEAD" if method == "HEAD" else "GET"
        connection.request(method, path, content, (JSON if body is not None else {}) | headers)
        with contextlib.closing(connection):
            response = connection.getresponse()
            text = response.read().decode()
            self.allowed = response.headers["access-control-allow-origin"]
            is_json = text and response.headers.get("content-type") == "application/json"
            return response.status, json.loads(text) if is_json else text

    def complete(self, **body: object) -> dict:
        status, answer = self.ask("/v1/completions", body)
        assert status == 200, answer
        return answer

    def texts(self, **body: object) -> list[str]:
        return [choice["text"] for choice in self.complete(**body)["choices"]]

    def events(self, **body: object) -> list[dict]:
        status, text = self.ask("/v1/completions", body | {"stream": True})
        assert status == 200, text
        events = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
        assert events.pop() == "[DONE]"
        return [json.loads(one) for one in events]


@contextlib.contextmanager
def served(*argv: object, longest: int | None = 6) -> Iterator[Served]:
    """What `predict_t5.py --serve` with these flags serves, in a thread, until the `with` block ends. longest: most
    tokens of an answer; None for a model that writes none."""
    found, ready = [], threading.Event()
    limit = [] if longest is None else ["--max_new_tokens", longest]

    class Process(server.Process):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            self.port = sockets[0].getsockname()[1]
            found.append(self)
            ready.set()

    def run():
        try:
            predict_t5.main([*map(str, ["--serve", "--use_cpu", "--port", 0, *limit, *argv])])
        finally:
            ready.set()

    with mock.patch.object(server, "Process", Process), contextlib.redirect_stdout(io.StringIO()):
        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(60) and found, "the server did not start"
        try:
            yield Served(found[0].service, found[0].port)
        finally:
            found[0].handle_exit(15, None)
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def threads_of_products() -> Iterator[set[threading.Thread]]:
    """The threads that load a model, or look up embeddings."""
    found = set()

    def told(function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            found.add(threading.current_thread())
            return function(*args, **kwargs)

        return call

    loads = mock.patch.object(PreTrainedModel, "tie_weights", told(PreTrainedModel.tie_weights))
    with loads, mock.patch.object(torch.nn.functional, "embedding", told(torch.nn.functional.embedding)):
        yield found


@contextlib.contextmanager
def timed_steps() -> Iterator[dict[int, list[float]]]:
    """{sources at work: [processor seconds of each step of the search, from the look into the queue to its end]}"""
    found, spent = defaultdict(list), [0.0]

    def timed(function: Callable) -> Callable:
        def call(*args: object) -> object:
            begun = time.thread_time()
            result = function(*args)
            spent[0] += time.thread_time() - begun
            return result

        return call

    taken, step = timed(TextBatches._taken), timed(decoding.Decoding.step)

    def whole_step(self: decoding.Decoding) -> None:
        at_work = len(self.places)
        step(self)
        found[at_work].append(spent[0])
        spent[0] = 0.0

    queue = mock.patch.object(TextBatches, "_taken", lambda *args: taken(*args))
    with queue, mock.patch.object(decoding.Decoding, "step", whole_step):
        yield found


def crowd(
    case: parameterized.TestCase,
    it: Served,
    path: str,
    bodies: list[dict],
    refused: list[tuple[int, object]],
    check: Callable[[dict, dict], None],
) -> None:
    """64 clients at once, which ask with any of the bodies, are refused, leave, are killed, or send half of a request,
    for T5_SERVE_SECONDS, and T5_SERVE_REQUESTS of them at least: each gets what it gets alone, no place is lost, and
    the memory does not grow. Prints what a record of results/ needs. check: compares an answer with that alone."""
    count, seconds = int(os.environ.get("T5_SERVE_REQUESTS", "70")), float(os.environ.get("T5_SERVE_SECONDS", "0"))
    chooser, done, memory = random.Random(0), Counter(), []
    asked = []  # (a body, its answer alone, the text of that as it is streamed, if it can be)
    for body in bodies:
        status, answer = it.ask(path, body)
        case.assertEqual(status, 200, answer)
        streams = path == "/v1/completions" and "logprobs" not in body
        asked.append((body, answer, answer["choices"][0]["text"] if streams else None))
    kinds = ["asks"] * 6 + ["streams", "chunks"] * 2 + ["is refused", "huge", "leaves", "is killed", "sends half"]

    def client(kind: str, number: int) -> None:
        body, wanted, text = asked[number % len(asked)]
        if kind == "streams" and text is not None:
            parts = (event["choices"][0] for event in it.events(**body))
            case.assertEqual("".join(part["text"] for part in parts if part["index"] == 0), text, body)
        elif kind in ("asks", "streams", "chunks"):
            sent = iter([json.dumps(body).encode()]) if kind == "chunks" else body
            status, answer = it.ask(path, sent, **JSON)
            case.assertEqual(status, 200, answer)
            check(answer, wanted)
        elif kind == "is refused":
            status, body = refused[number % len(refused)]
            case.assertEqual(it.ask(path, body)[0], status, str(body)[:80])
        elif kind == "huge":
            case.assertEqual(it.ask(path, b"{}", **{"Content-Length": str(2**23)})[0], 413)
        else:
            leave(kind, json.dumps(body | ({"stream": True} if text is not None and number % 2 else {})))

    def leave(kind: str, body: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", it.port)
        more = {"Content-Length": str(len(body) + 9)} if kind == "sends half" else {}
        connection.request("POST", path, body, JSON | more)
        if kind == "is killed":  # the system resets its connection
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def texts_kept() -> int:
        gc.collect()
        return sum(isinstance(one, WaitingText) for one in gc.get_objects())

    def plans(tenth: int) -> Iterator[tuple[str, int]]:
        end = time.monotonic() + seconds / 10
        while done.total() < count * tenth // 10 or time.monotonic() < end:
            kind = chooser.choice(kinds)
            done[kind] += 1
            yield kind, chooser.randrange(999)

    def follow(plans: Iterator[tuple[str, int]]) -> None:
        while True:
            with one_at_a_time:
                plan = next(plans, None)
            if plan is None:
                return
            client(*plan)

    before, kept, of_steps = it.service.counters.requests.total(), [], []
    one_at_a_time = threading.Lock()
    with ThreadPoolExecutor(64) as clients, timed_steps() as steps:
        for tenth in range(10):
            list(clients.map(follow, [plans(tenth + 1)] * 64))  # raises what a client raised
            memory.append(psutil.Process().memory_info().rss // 2**20)
            kept.append(texts_kept())
            of_steps.append({rows: [len(found), median(found)] for rows, found in sorted(steps.items())})
            steps.clear()
    counted, batches = it.service.counters.requests, it.service.batches
    # What clients that left had asked ends with its next token.
    wait_until(lambda: not (it.service.open or batches.waiting or batches.at_work or it.service.deadlines))
    kept.append(texts_kept())
    record = dict(requests=done, answered=dict(sorted(counted.items())), mib_after_each_tenth=memory)
    record |= dict(texts_kept_after_each_tenth_and_at_the_end=kept, steps_and_median_seconds_in_each_tenth=of_steps)
    print(json.dumps(record), file=sys.stderr)
    case.assertLessEqual(max(kept), 2 * batches.most_rows)  # of the batch before
    case.assertLessEqual({*counted}, {200, 400, 404, 413, server.GONE})
    # A connection that is reset at once may never be seen.
    case.assertBetween(counted.total() - before, done.total() - done["is killed"], done.total())
    if done.total() >= 1000:
        case.assertLess(memory[-1], 1.1 * memory[1])


def wait_until(holds: Callable[[], bool]) -> None:
    """Returns as soon as it does; fails after a minute."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it never does"
        time.sleep(0.01)


class ServerTest(TestCase):
    def of_file(self, *flags: object) -> list[str]:
        _, rows, _ = self.predict(self.write("in.txt", "\n".join(TEXTS)), *flags)
        return [row["prediction"] for row in rows]

    def test_one_living_thread_has_computed(self):
        """Two would wait for each other's products: see `run_in_short_lived_thread`."""
        with threads_of_products() as found, served("--model_name_or_path", workspace() / "export") as it:
            it.texts(prompt=TEXTS)
            living = [thread for thread in found if thread.is_alive()]
            self.assertEqual(living, [it.service.batches])
            self.assertGreater(len(found), 1)

    @parameterized.product(backend=("transformers", *BACKENDS), beams=(1, 3))
    def test_the_answers_are_those_of_predict_t5(self, backend, beams):
        """In one request, in many at once, and alone."""
        flags = ["--model_name_or_path", workspace() / "export", "--backend", backend, "--num_beams", beams]
        wanted = self.of_file(*flags)
        self.assertGreater(len(set(wanted)), 2)
        with served(*flags, "--max_wait_ms", 50) as it, ThreadPoolExecutor(8) as clients:
            self.assertEqual(it.texts(prompt=TEXTS), wanted)
            together = list(clients.map(lambda text: it.texts(prompt=text)[0], TEXTS * 3))
            self.assertEqual(together, wanted * 3)
            self.assertEqual([it.texts(prompt=text)[0] for text in TEXTS], wanted)
            sizes = it.service.counters.batches
            self.assertEqual(sizes.sum, 5 * len(TEXTS))
            self.assertLess(sum(sizes.counts), 5 * len(TEXTS))
            self.assertLen(it.texts(prompt=TEXTS[0], n=beams), beams)

    def test_the_client_of_openai(self):
        with served("--model_name_or_path", self.model) as it:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{it.port}/v1", api_key="any", max_retries=0)
            self.addCleanup(client.close)
            (about,) = client.models.list().data
            self.assertEqual((about.id, client.models.retrieve(about.id)), ("model", about))
            for ask in (client.models.retrieve, lambda name: client.completions.create(model=name, prompt="a")):
                with self.assertRaisesRegex(openai.NotFoundError, "model another/one"):
                    ask("another/one")
            found = client.completions.create(model=about.id, prompt=TEXTS, temperature=0)
            self.assertEqual([choice.text for choice in found.choices], plain_answers(TEXTS))
            self.assertEqual([choice.index for choice in found.choices], list(range(len(TEXTS))))
            self.assertFalse(hasattr(found, "warning"))
            parts = client.completions.create(model=about.id, prompt=TEXTS[2], stream=True)
            self.assertEqual("".join(part.choices[0].text for part in parts), found.choices[2].text)
            cut = client.completions.create(model=about.id, prompt=TEXTS, max_tokens=256, temperature=0)
            self.assertEqual([choice.text for choice in cut.choices], plain_answers(TEXTS))
            self.assertRegex(cut.warning, "^max_tokens 256: .* 6")
            self.assertIn("length", [choice.finish_reason for choice in cut.choices])
            (*_, last) = client.completions.create(model=about.id, prompt="a", max_tokens=7, stream=True)
            self.assertRegex(last.warning, "^max_tokens 7: .* 6")
            (*_, last) = client.completions.create(model=about.id, prompt="fox 걷", stream=True)
            self.assertRegex(last.warning, "^prompt: 1 of [0-9]+ tokens are <unk>")

    @parameterized.parameters(1, 3)
    def test_an_ensemble(self, beams):
        """The answers are those of `generate` over the mean, with the mean's log-probabilities."""
        models, sources = test_ensemble.loaded()
        flags = ("--model_name_or_path", *test_ensemble.folders(), "--num_beams", beams)
        tokenizer = AutoTokenizer.from_pretrained(test_ensemble.folders()[0])
        search = dict(max_new_tokens=6, eos_token_id=1) | (dict(num_beams=beams) if beams > 1 else {})
        with served(*flags) as it:
            (about,) = it.ask("/v1/models")[1]["data"]
            self.assertEqual((about["id"], about["ensemble"]), ("one+two", test_ensemble.folders()))
            answer = it.complete(model="one+two", prompt=test_ensemble.LINES, logprobs=1)
            for choice, ids in zip(answer["choices"], sources, strict=True):
                tokens = tokenizer.convert_tokens_to_ids(choice["logprobs"]["tokens"])
                self.assertEqual([tokens], test_ensemble.generated(models, ids, **search)[0])
                wanted = test_ensemble.log_probs(models, ids, tokens)[range(len(tokens)), tokens].tolist()
                for found, nats in zip(choice["logprobs"]["token_logprobs"], wanted, strict=True):
                    self.assertAlmostEqual(found, nats, delta=1e-4)

    def test_drawn_answers_repeat_in_any_batch(self):
        body = dict(temperature=1.5, n=3, seed=5)
        with served("--model_name_or_path", self.model, "--max_wait_ms", 50) as it, ThreadPoolExecutor(8) as clients:
            alone = it.texts(prompt=TEXTS[0], **body)
            self.assertGreater(len(set(alone)), 1)
            ask = lambda seed: it.texts(prompt=TEXTS[0], **body | {"seed": seed})  # noqa: E731
            self.assertEqual(list(clients.map(ask, (1, 5, 2, 5)))[1::2], [alone, alone])
            self.assertNotEqual(ask(6), alone)
            likeliest = it.texts(prompt=TEXTS[0], temperature=1.0, top_p=1e-6, seed=1)
            self.assertEqual(likeliest, plain_answers(TEXTS[:1]))

    def test_an_error_belongs_to_its_own_text(self):
        """Texts that are answered together: one draws fewer tokens than the others may have, one fails."""
        begun, goes_on = threading.Event(), threading.Event()
        drawn = dict(prompt=TEXTS[0], temperature=1.5, seed=5, max_tokens=2)
        stopped = dict(prompt=TEXTS[2], stop=["no such text"], logprobs=1)
        with served("--model_name_or_path", self.model, "--max_wait_ms", 0) as it, ThreadPoolExecutor(8) as clients:
            alone, stopped_alone = it.texts(**drawn), it.complete(**stopped)["choices"]
            batches, engine, find = it.service.batches, it.service.batches.engine, it.service.batches.engine.find
            (source,) = load_tokenizer(str(self.model))([TEXTS[3]])["input_ids"]

            def checked(sources: list) -> list:
                if source in [one.ids for one in sources]:
                    raise RuntimeError("this text fails")
                return sources

            def held(sources: list, more: Callable[[int], list], **settings: object) -> None:
                begun.set()
                self.assertTrue(goes_on.wait(60))
                find(checked(sources), more=lambda places: checked(more(places)), **settings)

            engine.find = held
            first = clients.submit(it.texts, prompt=TEXTS[5])
            self.assertTrue(begun.wait(60))
            beside = [clients.submit(it.texts, prompt=text) for text in TEXTS[:3]]
            beside_drawn = clients.submit(it.texts, **drawn)
            beside_stopped = clients.submit(it.complete, **stopped)
            streamed = clients.submit(it.events, prompt=TEXTS[2])
            failing = clients.submit(it.ask, "/v1/completions", {"prompt": TEXTS[3], "logprobs": 1})
            with batches.changed:
                self.assertTrue(batches.changed.wait_for(lambda: len(batches.waiting) == 7, 60))
            with mock.patch("traceback.print_exc") as printed:
                goes_on.set()
                wanted = plain_answers(TEXTS)
                self.assertEqual(first.result(), wanted[5:])
                self.assertEqual([one.result() for one in beside], [[text] for text in wanted[:3]])
                self.assertEqual(beside_drawn.result(), alone)
                self.assertEqual("".join(e["choices"][0]["text"] for e in streamed.result()), wanted[2])
                self.assertEqual(failing.result()[0], 500)
                (choice,), (other,) = beside_stopped.result()["choices"], stopped_alone
                self.assertEqual(choice["text"], other["text"])
            self.assertEqual(printed.call_count, 2)  # of the batch, and of the text alone
            self.assertEqual(it.service.counters.requests[500], 1)

    def test_stop_length_usage_and_log_probabilities(self):
        with served("--model_name_or_path", self.model) as it:
            tokenizer, whole = AutoTokenizer.from_pretrained(self.model), it.complete(prompt=TEXTS[2], logprobs=1)
            (choice,), usage = whole["choices"], whole["usage"]
            self.assertEqual(usage["prompt_tokens"], len(tokenizer(TEXTS[2])["input_ids"]))
            self.assertEqual(usage["completion_tokens"], len(choice["logprobs"]["tokens"]))
            ids = tokenizer.convert_tokens_to_ids(choice["logprobs"]["tokens"])
            model = AutoModelForSeq2SeqLM.from_pretrained(self.model)
            with torch.no_grad():
                loss = model(**tokenizer(TEXTS[2], return_tensors="pt"), labels=torch.tensor([ids])).loss.item()
            self.assertAlmostEqual(-sum(choice["logprobs"]["token_logprobs"]), loss * len(ids), places=3)
            for limit in range(1, 7):
                short = it.complete(prompt=TEXTS[2], max_tokens=limit)
                self.assertEqual(short["usage"]["completion_tokens"], min(limit, len(ids)))
                self.assertStartsWith(choice["text"], short["choices"][0]["text"])
            text = max(it.texts(prompt=TEXTS), key=len)
            prompt = TEXTS[it.texts(prompt=TEXTS).index(text)]
            stop = text[len(text) // 2 :][:2]
            (stopped,) = it.complete(prompt=prompt, stop=stop)["choices"]
            self.assertEqual((stopped["text"], stopped["finish_reason"]), (text[: text.index(stop)], "stop"))
            events = it.events(prompt=prompt, stop=[stop], stream_options={"include_usage": True})
            self.assertEqual("".join(one["choices"][0]["text"] for one in events[:-1]), stopped["text"])
            self.assertEqual(events[-2]["choices"][0]["finish_reason"], "stop")
            self.assertGreater(events[-1]["usage"]["total_tokens"], 0)

    @parameterized.parameters("transformers", *BACKENDS)
    def test_columns_and_classes(self, backend):
        folder = self.folder / "tuned"
        shutil.copytree(workspace() / "export", folder)
        (folder / "task.json").write_text(json.dumps(dict(benchmark="glue", dataset_name="rte")))
        row = {"sentence1": "old fox number 7", "sentence2": "very old fox"}
        (wanted,) = plain_answers(["rte sentence1: old fox number 7 sentence2: very old fox"])
        with served("--model_name_or_path", folder, "--backend", backend) as it:
            empty = {"sentence1": "", "sentence2": ""}
            first, second = it.complete(prompt=[row, empty], probabilities=True)["choices"]
            self.assertEqual((first["text"], second["text"]), (wanted, ""))
            self.assertEqual(list(first["probabilities"]), ["entailment", "not_entailment"])
            self.assertAlmostEqual(sum(first["probabilities"].values()), 1, places=5)
            for body, named in (
                ({"prompt": row, "temperature": 1.0}, "^temperature 1: .*entailment, not_entailment"),
                ({"prompt": "a text"}, "^prompt: .*sentence1, sentence2"),
                ({"prompt": {"sentence1": "a"}}, "^prompt: .*sentence1, sentence2"),
                ({"prompt": row | {"more": "b"}}, "^prompt: .*sentence1, sentence2"),
            ):
                status, answer = it.ask("/v1/completions", body)
                self.assertEqual(status, 400)
                self.assertRegex(answer["error"]["message"], named)

    def test_wrong_requests_get_one_line(self):
        """Which names the field, its value, and what is possible."""
        drawn = {"prompt": "a", "temperature": 1}
        with served("--model_name_or_path", self.model, "--max_source_length", 8, "--max_queue", 4) as it:
            for body, status, named in (
                (b"{", 400, "JSON"),
                (b"[1]", 400, "JSON|dictionary"),
                (b"[" * 100_000, 400, "body|JSON"),
                (b'{"prompt": "a", "\\udfff": 1}', 400, "JSON"),
                (b'{"prompt": "\\ud800"}', 400, "^prompt: text "),
                (b'{"prompt": "a", "model": "\\ud800"}', 404, r"model \\ud800: .*model"),
                ({}, 400, "^prompt: "),
                ({"prompt": None}, 400, "^prompt: "),
                ({"prompt": 3}, 400, "^prompt: .* text, "),
                ({"prompt": []}, 400, "^prompt: .*empty"),
                ({"prompt": [[1, 2]]}, 400, "^prompt: "),
                ({"prompt": {"text": ["a"]}}, 400, "^prompt: text "),
                ({"prompt": "a", "n": 2}, 400, "^n 2: .* 1 answers"),
                ({"prompt": "a", "temperature": 3}, 400, "^temperature: .* 2"),
                ({"prompt": "a", "temperature": 1e-30}, 400, "^temperature 1e-30: .* 0.01 to 2"),
                (b'{"prompt": "a", "temperature": NaN}', 400, "^temperature: "),
                ({"prompt": "a", "top_p": 0.5}, 400, "^top_p 0.5: .* temperature"),
                ({"prompt": "a", "stop": [""]}, 400, "^stop: .* 1 "),
                ({"prompt": "a", "stop": list("abcde")}, 400, "^stop: .* 4 "),
                ({"prompt": "a", "logprobs": 1, "stream": True}, 400, "^stream: .*logprobs"),
                ({"prompt": "a", "probabilities": True}, 400, "^probabilities: .* classes"),
                ({"prompt": "a", "file": "/etc/passwd"}, 400, "^file: "),
                ({"prompt": "a", "more": None}, 400, "^more: "),
                ({"prompt": "yes no " * 40}, 400, r"^prompt: .* \d+ tokens, .* 8"),
                ({"prompt": ["a"] * 5}, 400, "^prompt: .* 5 texts, .* 4 "),
                (drawn | {"n": 10**5}, 400, "^prompt: .* 100,000 texts, .* 4 "),
                ({"prompt": "a " * 2**20}, 400, "^prompt: text: .* 2,097,152 .* 65,536 "),
            ):
                with self.subTest(named):
                    found, answer = it.ask("/v1/completions", body)
                    self.assertEqual(found, status, answer)
                    self.assertRegex(answer["error"]["message"], named)
                    self.assertNotIn("\n", answer["error"]["message"])
            elsewhere = ("evil.example", "a b", "", "localhost.evil.example", "127.0.0.1:80:80", "evil@localhost")
            length, chunks = {"Content-Length": str(2**23)}, [b'{"prompt"', b': "a"}']
            for body, status, headers in (
                *((b'{"prompt": "a"}', 415, {"Content-Type": kind}) for kind in ("text/plain", "")),
                *(({"prompt": "a"}, 403, {"Host": host}) for host in elsewhere),
                *(({"prompt": "a"}, 200, {"Host": host}) for host in ("LOCALHOST:1", "[::1]:8000", "127.0.0.1")),
                (b"{}", 413, length),
                (iter(chunks), 200, JSON),
            ):
                self.assertEqual(it.ask("/v1/completions", body, **headers)[0], status, headers)
            with mock.patch.object(server, "MOST_BYTES", 9):
                self.assertEqual(it.ask("/v1/completions", iter(chunks), **JSON)[0], 413)
            for path, status in (("/health", 200), ("/v1/models", 200), ("/metrics", 200), ("/docs", 404)):
                self.assertEqual(it.ask(path, method="HEAD"), (status, ""), path)
                self.assertEqual(it.ask(path)[0], status, path)
            page = it.ask("/metrics")[1]
            self.assertIn('t5_requests_total{status="413"} 2\n', page)
            self.assertIn("t5_queue_texts 0\n", page)
            self.assertIn("t5_request_seconds_count 4\n", page)  # those that were answered

    def test_fields_that_change_nothing(self):
        with served("--model_name_or_path", self.model) as it:
            wanted = it.texts(prompt="a")
            for more in (
                {name: None for name in completions.Completion.model_fields if name != "prompt"},
                dict(presence_penalty=0.0, frequency_penalty=0.0, best_of=1, logit_bias={}, echo=False),
                dict(temperature=0, top_p=0.9),
            ):
                self.assertEqual(it.texts(prompt="a", **more), wanted)
            options = dict(include_usage=True, include_obfuscation=False)
            self.assertIn("usage", it.events(prompt="a", stream_options=options)[-1])
            self.assertNotIn("usage", it.events(prompt="a", stream_options=dict(include_usage=None))[-1])
        with served("--model_name_or_path", self.model, "--max_source_length", 8, "--cut_sources") as it:
            short, long = (it.complete(prompt="yes no " * times)["choices"][0] for times in (40, 2**18))
            self.assertGreater(short["cut_from"], 40)
            self.assertEqual(long["text"], short["text"])

    def test_a_large_request_lets_others_in(self):
        """Its texts are tokenised one by one, and not at all where they are too many or too long."""
        begun, goes_on, seen = threading.Event(), threading.Event(), []
        with served("--model_name_or_path", self.model) as it, ThreadPoolExecutor(2) as clients:
            reader = it.service.reader
            prompt = reader.prompt

            def slow(body: object, given: str, *more: object) -> object:
                seen.append(given)
                if given == "large":
                    begun.set()
                    self.assertTrue(goes_on.wait(60))
                return prompt(body, given, *more)

            with mock.patch.object(reader, "prompt", slow):
                for body in (dict(prompt=["a"] * 2049), dict(prompt="a", n=10**9, temperature=1)):
                    self.assertEqual(it.ask("/v1/completions", body)[0], 400)
                self.assertEmpty(seen)
                large = clients.submit(it.texts, prompt=["large", *["a"] * 50])
                self.assertTrue(begun.wait(60))
                small = clients.submit(it.texts, prompt=TEXTS[0])
                while reader and it.service.thread._work_queue.empty():  # until the other request's text waits
                    pass
                goes_on.set()
                self.assertEqual(small.result(), plain_answers(TEXTS[:1]))
                self.assertLen(large.result(), 51)
            self.assertLess(seen.index(TEXTS[0]), 3)

    def test_the_key_and_pages_of_other_sites(self):
        page, path, body, asks = "http://localhost:3000", "/v1/completions", {"prompt": "a"}, {}
        asks["Access-Control-Request-Method"] = "POST"
        asks["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang"
        flags, key = ["--model_name_or_path", self.model, "--cors_origin", page, "https://a.example"], "Bearer s3cret"
        environment = mock.patch.dict(os.environ, T5_API_KEY="s3cret")
        with environment, self.assertNoLogs(level="WARNING"), served(*flags) as it:
            keys = {"": 401, "s3cret": 401, "Bearer another": 401, key: 200, "bearer  s3cret": 200}
            for sent, status in keys.items():
                for place, content in ((path, body), ("/v1/models", None), ("/metrics", None)):
                    found, answer = it.ask(place, content, Authorization=sent)
                    self.assertEqual(found, status)
                    self.assertNotIn("s3cret", str(answer))
            self.assertEqual(it.ask("/health")[0], 200)
            for method, origin, sent, status, allowed in (
                ("OPTIONS", page, asks, 200, page),
                ("OPTIONS", "http://evil.example", asks, 400, None),
                ("POST", page, {"Authorization": key}, 200, page),
                ("POST", page, {}, 401, page),
                ("POST", "http://evil.example", {"Authorization": key}, 200, None),
            ):
                found, _ = it.ask(path, body, method, Origin=origin, **sent)
                self.assertEqual((found, it.allowed), (status, allowed), (method, origin, sent))
        with served("--model_name_or_path", self.model) as it:
            status, _ = it.ask(path, body, "OPTIONS", Origin=page, **asks)
            self.assertEqual((status >= 400, it.allowed), (True, None))

    @parameterized.parameters(False, True)
    def test_the_queue_those_who_leave_and_the_end(self, streams):
        begun, goes_on, left = threading.Event(), threading.Event(), threading.Event()
        with served("--model_name_or_path", self.model, "--max_queue", 2, "--max_wait_ms", 0) as it:
            batches, find, leave = it.service.batches, it.service.batches.engine.find, it.service.batches.leave

            def held(*args, **settings):
                begun.set()
                self.assertTrue(goes_on.wait(60))
                find(*args, **settings)

            def leaving(rows):
                leave(rows)
                left.set()

            batches.engine.find, batches.leave = held, leaving
            with ThreadPoolExecutor(4) as clients:
                first = clients.submit(it.texts, prompt=TEXTS[0])
                self.assertTrue(begun.wait(60))
                gone = http.client.HTTPConnection("127.0.0.1", it.port)
                body = json.dumps({"prompt": TEXTS[1:3], "stream": streams})
                gone.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                with batches.changed:
                    self.assertTrue(batches.changed.wait_for(lambda: len(batches.waiting) == 2, 60))
                self.assertEqual(it.ask("/v1/completions", {"prompt": "a"})[0], 429)
                gone.sock.close()
                gone.close()
                self.assertTrue(left.wait(60))
                self.assertEmpty(batches.waiting)
                second = clients.submit(it.texts, prompt=TEXTS[1])
                with batches.changed:
                    self.assertTrue(batches.changed.wait_for(lambda: len(batches.waiting) == 1, 60))
                it.service.ends = True
                self.assertEqual(it.ask("/v1/completions", {"prompt": "a"})[0], 503)
                self.assertEqual(it.ask("/health")[0], 503)
                goes_on.set()
                self.assertEqual(first.result() + second.result(), plain_answers(TEXTS[:2]))
        self.assertEqual(it.service.counters.requests, {200: 2, 429: 1, 499: 1, 503: 1})
        self.assertEqual(sum(it.service.counters.seconds.counts), 2)

    @parameterized.parameters(dict(stream=True), dict(stop=["no such text"]), dict(logprobs=1))
    def test_what_is_decoded_grows_with_the_answer(self, **body):
        length, sizes = 60, []

        def counting(tokenizer, rows):
            rows = [*rows]
            sizes.extend(map(len, rows))
            return decoded(tokenizer, rows)

        flags = ["--model_name_or_path", self.model, "--min_new_tokens", length]
        with served(*flags, longest=length) as it, mock.patch.object(completions, "decoded", counting):
            status, answer = it.ask("/v1/completions", {"prompt": TEXTS[2]} | body)
            self.assertEqual(status, 200, answer)
        self.assertGreater(max(sizes), length - 10)  # the whole answer, at its end
        self.assertLess(sum(sizes), length**2 / 2)  # decoded whole for each token, it would be more than that

    def test_tokens_are_drawn_as_their_probabilities_say(self):
        """Worked by hand: at temperature 0.5 probabilities are squared; 0.68 + 0.25 reach top_p 0.8. nan takes the
        likeliest."""
        scores = completions.warp_of(0.5, 0.8)(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()).repeat(4001, 1)
        found = decoding.drawn(scores, torch.cat([torch.rand(4000, dtype=torch.float64), torch.tensor([torch.nan])]))
        wanted = [0.25 / 0.34, 0.09 / 0.34, 0, 0]
        for share, count in zip(wanted, found[:-1].bincount(minlength=4).tolist(), strict=True):
            self.assertAlmostEqual(share, count / 4000, delta=0.025)
        self.assertEqual(found[-1], 0)

    def test_an_answer_is_forced_to_end_at_its_own_limit(self):
        """As by `generate`, where texts with other limits wait beside it."""
        folder, limits = shutil.copytree(self.model, self.folder / "forced"), (2, 6, 3)
        own = GenerationConfig.from_pretrained(folder)
        own.update(forced_eos_token_id=1, min_new_tokens=6)
        own.save_pretrained(folder)
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
        ask = lambda limit: it.complete(prompt=TEXTS[2], max_tokens=limit, logprobs=1)["choices"][0]  # noqa: E731
        with served("--model_name_or_path", folder, "--max_wait_ms", 50) as it, ThreadPoolExecutor(3) as clients:
            found = [tokenizer.convert_tokens_to_ids(one["logprobs"]["tokens"]) for one in clients.map(ask, limits)]
        source = tokenizer(TEXTS[2], return_tensors="pt")
        self.assertEqual(found, [model.generate(**source, max_new_tokens=limit)[0, 1:].tolist() for limit in limits])
        self.assertEqual([tokens[-1] for tokens in found], [1, 1, 1])

    def test_a_batch_holds_texts_of_like_length(self):
        rows = [WaitingText([0] * size, 2, told=mock.Mock()) for size in (10, 50, 11, 90, 12)]
        batches = TextBatches(mock.Mock(), Counters(), most_rows=3, most_tokens=30, most_waiting=9, seconds=0)
        batches.put(rows)
        sizes = [[len(row.ids) for row in batches._next()] for _ in range(4)]
        self.assertEqual(sizes, [[11, 10], [50], [90], [12]])

    def test_a_batch_that_never_empties_keeps_nothing(self):
        """2,000 texts go through one batch of 8, each put when another is answered. A long one makes it small for as
        long as it is there."""
        model = load_model(str(self.model)).eval()
        model.generation_config.update(suppress_tokens=[1])  # an answer has as many tokens as its limit
        finder, memories, sizes, ids = AnswerFinder(model, 8), [], [], itertools.count(1)
        batches = TextBatches(finder, Counters(), most_rows=8, most_tokens=150, most_waiting=99, seconds=0)
        living, most_living = weakref.WeakValueDictionary(), 0

        def put() -> None:
            number = next(ids)
            if number <= 2000:
                size, limit = (60, 13) if number == 100 else (2, 2 + number % 3)
                text = WaitingText([5] * size, limit, told=partial(told, number))
                living[number] = text
                batches.put([text])

        def told(number: int) -> None:
            nonlocal most_living
            if living[number].is_answered:
                most_living = max(most_living, len(living))
                sizes.append(len(batches.at_work))
                put()
            if number == 2000:
                batches.close()

        class Counted(decoding.KVCache):
            def __init__(self, *args):
                super().__init__(*args)
                memories.append(self)  # of each batch

        for _ in range(20):
            put()
        with mock.patch.object(decoding, "KVCache", Counted):
            batches.run()
        self.assertLen(sizes, 2000)
        self.assertLessEqual(most_living, 20 + 2 * 8)
        self.assertEmpty(batches.at_work)
        self.assertEqual((min(sizes[8:1900]), max(sizes[1000:])), (1, 7))
        (memory,) = memories
        self.assertLessEqual(memory.cache.shape[4], 64)

    def test_the_figures_of_the_page_are_those_measured(self):
        page, rows = (ROOT / "docs/use.md").read_text(encoding="utf-8"), {}
        for row in json.loads((ROOT / "results/2026-11-28_serve_small_cpu.json").read_text())["rows"]:
            if "error" not in row:
                rows.setdefault(row["name"], []).append(row)
        for clients in rows.values():
            cells = [f"{row['answers_per_s']:.3g}" for row in clients]
            cells.append(f"{clients[-1]['median_ms'] / 1000:.3g}, {clients[-1]['p99_ms'] / 1000:.3g} s")
            self.assertIn(f" | {' | '.join(cells)} |\n", page)

    @parameterized.parameters(
        (["--serve", "--input_file", "in.txt"], "--input_file in.txt: "),
        (["--serve", "--do_sample"], "--do_sample True: "),
        (["--serve", "--web"], "--serve: excludes --web"),
        (["--port", 8001], "--port 8001: needs --serve"),
        (["--serve", "--cors_origin", "http://a.example/"], "--cors_origin http://a.example/: "),
        (["--serve", "--cors_origin", "null"], "--cors_origin null: "),
    )
    def test_flags_that_do_not_go_together(self, flags, named):
        self.assertIn(named, run_main(predict_t5.main, *flags, code=2)[2])

    @parameterized.parameters(1, 3)
    def test_requests_of_all_kinds_at_once(self, beams):
        answered = {
            "whole": dict(),
            "with nulls": dict(n=None, stream=None, seed=None, stop=None, logprobs=None),
            "too many tokens": dict(max_tokens=256),
            "drawn": dict(temperature=1.5, seed=5, max_tokens=2),
            "drawn several times": dict(temperature=1.0, top_p=0.9, seed=7, n=3),
            "by all beams": dict(n=beams),
            "short": dict(max_tokens=2),
            "stopped": dict(stop=["no such text"]) | (dict(logprobs=1) if beams == 1 else {}),
        }
        refused = [
            (400, {"prompt": "yes no " * 99}),
            (400, {"prompt": "yes no " * 500_000}),
            (400, {"prompt": ["a"] * 50_000}),
            (400, {"prompt": "a", "n": 100_000, "temperature": 1}),
            (404, b'{"prompt": "a", "model": "\\ud800"}'),
            (400, b'{"prompt'),
        ]
        bodies = [{"prompt": text} | more for text in TEXTS for more in answered.values()]
        flags = ["--model_name_or_path", self.model, "--max_source_length", 60, "--num_beams", beams]
        with served(*flags, longest=48) as it:
            check = lambda answer, alone: self.assertEqual(answer["choices"], alone["choices"])  # noqa: E731
            crowd(self, it, "/v1/completions", bodies, refused, check)
            texts = [it.texts(prompt=text, max_tokens=6) for text in TEXTS]
        self.assertEqual(texts, [[text] for text in plain_answers(TEXTS, num_beams=beams)])

    def test_a_process_that_is_told_to_end(self):
        words = ["predict_t5.py", "--serve", "--use_cpu", "--port", "0", "--model_name_or_path", str(self.model)]
        process = subprocess.Popen(command_that_lists(*words), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        port = next(found[1] for line in process.stdout if (found := re.search(r"answers at http://.*:(\d+)", line)))
        self.assertEqual(Served(None, int(port)).texts(prompt="yes no", max_tokens=6), plain_answers(["yes no"]))
        halves = [socket.create_connection(("127.0.0.1", int(port)), 60) for _ in range(2)]
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        halves[0].sendall(head + b"Content-Length: 99\r\n\r\n{")  # it never comes whole
        halves[1].sendall(head)
        self.assertEqual(Served(None, int(port)).ask("/health")[0], 200)
        process.send_signal(signal.SIGTERM)
        self.assertIn(b" 503 ", halves[0].recv(99))
        self.assertEqual(halves[1].recv(99), b"")
        for half in halves:
            half.close()
        printed = process.stdout.read()
        self.assertRegex(printed, r"\nrequests ")
        self.assertEqual(process.wait(60), 0)
        self.assertEmpty(loaded_in_vain("serving", printed))


class GrowingTest(parameterized.TestCase):
    @parameterized.parameters("t5_v1_0", "mt5", "umt5", "byt5", "t5gemma")
    def test_the_text_is_that_of_all_tokens_and_what_is_settled_stays(self, family):
        """Also where letters are written in bytes, whole or broken, between special tokens and padding."""
        zoo.write_checkpoint(self.folder / family, family)
        tokenizer, chooser = load_tokenizer(str(self.folder / family)), random.Random(0)
        texts = ["the șarpe 日本語 🙂🙂 x", "é", "  two  spaces ", "e\u0301 नमस्ते 👩‍👩‍👧"]
        for number in range(300):
            tokens = [chooser.randrange(len(tokenizer)) for _ in range(chooser.randrange(1, 40))]
            for text in chooser.sample(texts, number % 3):
                place = chooser.randrange(len(tokens))
                tokens[place:place] = tokenizer(text)["input_ids"][: chooser.randrange(1, 30)]
            (whole,) = decoded(tokenizer, [tokens])
            detokenizer, end, before = completions.IncrementalDetokenizer(tokenizer), 0, ""
            while end < len(tokens):
                end += chooser.choice((1, 1, 1, 2, 5))
                self.assertEqual([detokenizer.text(tokens[:end])], decoded(tokenizer, [tokens[:end]]), tokens[:end])
                self.assertStartsWith(whole, detokenizer.settled)
                self.assertStartsWith(detokenizer.settled, before)
                before = detokenizer.settled
