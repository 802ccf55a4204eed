"""predict_t5.py --web: the page gives the answers of predict_t5.py, in a browser too, and asks no other machine."""

import asyncio
import contextlib
import html
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

import gradio
import torch
from absl.testing import parameterized
from gradio_client import Client
from head_folders import ARE_THERE, NOT_THERE, answers_to_file, head_folder, texts_of
from helpers import run_main
from test_predict_t5 import BACKENDS, workspace
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import constants
import predict_t5
from features.web_page import page as web_page
from features.web_page.page import order_of

ROOT = Path(constants.__file__).parent
PAIRS = [("old fox number 7", "very old fox"), ("yes no", "answer 3"), ("", "")]
WITHOUT_WINDOW = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"]


@contextlib.contextmanager
def opened(*argv: object) -> Iterator[str]:
    """The address of the page that the script opens; it is served until the `with` block ends."""
    pages = []
    blocked = mock.patch.object(gradio.Blocks, "block_thread", lambda page: pages.append(page))
    # stderr stays: the server's start closes the handlers of logs, and absl's closes a stream that is not stderr.
    with blocked, contextlib.redirect_stdout(io.StringIO()):
        predict_t5.main(["--web", "--use_cpu", *map(str, argv)])
    try:
        yield pages[0].local_url
    finally:
        gradio.close_all(verbose=False)


def client_of(url: str) -> Client:
    return Client(url, verbose=False, analytics_enabled=False)


class Browser:
    """Chromium without a window, driven by the W3C's WebDriver protocol."""

    def __enter__(self):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        lines = iter(self.driver.stdout.readline, "")
        port = next(filter(None, (re.search(r"on port (\d+)\.", line) for line in lines)))[1]
        self.url = f"http://127.0.0.1:{port}"
        wanted = {"goog:chromeOptions": {"args": WITHOUT_WINDOW}, "goog:loggingPrefs": {"performance": "ALL"}}
        session = self.ask("/session", capabilities={"alwaysMatch": wanted})
        self.url += f"/session/{session['sessionId']}"
        self.ask("/timeouts", implicit=30_000)  # for elements that are not there yet
        return self

    def __exit__(self, *_):
        urllib.request.urlopen(urllib.request.Request(self.url, method="DELETE"), timeout=60).close()
        self.driver.terminate()
        self.driver.communicate(timeout=60)

    def ask(self, path: str, **body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def find(self, xpath: str) -> str:
        return "/element/" + next(iter(self.ask("/element", using="xpath", value=xpath).values()))

    def box(self, name: str) -> str:
        return self.find(f"//label[.//span[normalize-space()='{name}']]//textarea")

    def value(self, name: str) -> str:
        with urllib.request.urlopen(f"{self.url}{self.box(name)}/property/value", timeout=60) as answer:
            return json.load(answer)["value"]

    def requested(self) -> set[str]:
        """The addresses that the page asked for."""
        messages = [json.loads(line["message"])["message"] for line in self.ask("/se/log", type="performance")]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        opened = [one["params"] for one in messages if one["method"] == "Network.webSocketCreated"]
        return {one["request"]["url"] for one in sent} | {one["url"] for one in opened}


class WebPageTest(parameterized.TestCase):
    def model(self, name: str = "export", **record) -> Path:
        folder = self.folder / "tuned"
        shutil.copytree(workspace() / name, folder)
        record = record or dict(benchmark="glue", dataset_name="rte")
        (folder / "task.json").write_text(json.dumps(record))
        return folder

    def of_file(self, *flags: object) -> list[dict]:
        """What predict_t5.py answers to PAIRS in a file, one at a time."""
        rows = [json.dumps({"sentence1": one, "sentence2": two}) for one, two in PAIRS]
        (self.folder / "in.jsonl").write_text("\n".join(rows))
        out = self.folder / "out.jsonl"
        files = ["--input_file", self.folder / "in.jsonl", "--output_file", out, "--batch_size", 1]
        run_main(predict_t5.main, "--use_cpu", *files, *flags)
        return [json.loads(line) for line in out.read_text().splitlines()]

    @parameterized.product(backend=("transformers", *BACKENDS), beams=(1, 3))
    def test_the_answers_are_those_of_predict_t5(self, backend, beams):
        flags = ["--model_name_or_path", self.model(), "--backend", backend, "--max_new_tokens", 6]
        flags += ["--num_beams", beams, "--num_return_sequences", beams]
        wanted = self.of_file(*flags)
        self.assertNotEmpty(wanted[0]["prediction"])
        notes = ["1 answer without an end within 6 tokens (--max_new_tokens)"]
        notes.append("1 answer not among entailment, not_entailment")
        with mock.patch.object(gradio, "Warning") as shown, opened(*flags) as url:
            client = client_of(url)
            for pair, line in zip(PAIRS, wanted, strict=True):
                answer, *n_best, labels, read, milliseconds = client.predict(*pair, api_name="/answer")
                self.assertEqual(answer, line["prediction"])
                expected = [[one["prediction"], one["log_probability"]] for one in line.get("n_best", [])]
                self.assertEqual([one["data"] for one in n_best], [expected] * (beams > 1))
                source = f"rte sentence1: {pair[0]} sentence2: {pair[1]}" if pair[0] else ""
                tokens = AutoTokenizer.from_pretrained(self.folder / "tuned")
                self.assertEqual(read, tokens.decode(tokens(source)["input_ids"][:-1]) if source else "")
                self.assertRegex(milliseconds, r"^\d+$")
                self.assertEqual(bool(labels), bool(source))
                self.assertEqual([call.args[0] for call in shown.call_args_list], notes if source else [])
                shown.reset_mock()

    def test_what_the_model_read_is_decoded_from_its_ids(self):
        """A question behind the cut is not shown as read."""
        folder = self.model()
        tokens = AutoTokenizer.from_pretrained(folder)
        pair = ("very very very old fox number", "answer yes no")
        ids = tokens(f"rte sentence1: {pair[0]} sentence2: {pair[1]}")["input_ids"]
        with opened("--model_name_or_path", folder, "--max_source_length", 15, "--max_new_tokens", 6) as url:
            *_, read, _ = client_of(url).predict(*pair, api_name="/answer")
        self.assertEqual(read, f"{tokens.decode(ids[:14])} ... (cut: 15 of {len(ids)} tokens)")
        self.assertNotIn("answer", read)

    def test_the_names_on_the_page_are_no_markup(self):
        flags = ["--model_name_or_path", self.model(), "--num_beams", 2, "--num_return_sequences", 2]
        prefix = "a` <img src=x onerror=alert(1)> `b "
        with opened(*flags, "--source_prefix", prefix) as url:
            parts = client_of(url).config["components"]
        values = [str(part["props"].get("value")) for part in parts]
        (shown,) = (value for value in values if "The model reads" in value)
        self.assertIn(f"<code>{html.escape(prefix)}sentence1: &lt;sentence1&gt;", shown)
        self.assertNotIn("<img", shown)
        labels = [part["props"].get("label") for part in parts]
        self.assertIn("all answers, the best first by log_probability / tokens ** 1", labels)

    @parameterized.parameters((0.0, "log_probability"), (1.0, "log_probability / tokens ** 1"))
    def test_the_order_of_beams_is_named(self, power, order):
        """That of the scores of `generate`: test_beams_have_the_scores_of_generate (test_decoding.py)."""
        plan = mock.Mock(search=dict(num_beams=4, length_penalty=power))
        self.assertEqual(order_of(mock.Mock(settings={}), plan), order)

    @parameterized.parameters("transformers", *BACKENDS)
    def test_probabilities_of_the_classes(self, backend):
        """Those of plain transformers: each label's loss, times its tokens, softmaxed."""
        folder = self.model()
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
        source = tokenizer("rte sentence1: yes no sentence2: answer 3", return_tensors="pt")
        names, nats = ("entailment", "not_entailment"), []
        for name in names:
            labels = tokenizer(name, return_tensors="pt").input_ids
            nats.append(model(**source, labels=labels).loss.item() * labels.shape[1])
        wanted = dict(zip(names, torch.tensor(nats).neg().softmax(0).tolist(), strict=True))
        with opened("--model_name_or_path", folder, "--backend", backend) as url:
            _, labels, *_ = client_of(url).predict(*PAIRS[1], api_name="/answer")
        found = {one["label"]: one["confidence"] for one in labels["confidences"]}
        self.assertEqual(found.keys(), wanted.keys())
        for name, chance in wanted.items():
            self.assertAlmostEqual(found[name], chance, places=4)

    def test_a_text_in_pieces_and_a_model_without_a_task(self):
        line = "Old fox. Very old fox number 7."
        for record, flags in ((dict(benchmark="text", dataset_name="restore_diacritics"), []), (None, ["--bf16"])):
            folder = self.model(**record) if record else workspace() / "model"
            flags = ["--model_name_or_path", folder, "--max_new_tokens", 6, *flags]
            (self.folder / "in.txt").write_text(line)
            files = ["--input_file", self.folder / "in.txt", "--output_file", self.folder / "out.jsonl"]
            run_main(predict_t5.main, "--use_cpu", *files, "--overwrite_output_file", *flags)
            wanted = json.loads((self.folder / "out.jsonl").read_text())["prediction"]
            with opened(*flags) as url:
                answer, read, _ = client_of(url).predict(line, api_name="/answer")
            self.assertEqual(answer, wanted)
            self.assertIn("old fox number 7", read)

    @unittest.skipUnless(ARE_THERE, NOT_THERE)
    @parameterized.parameters("class", "labels", "number", "tokens", "entities")
    def test_heads(self, kind):
        """The answers of predict_t5.py; tags stand on their words."""
        folder = head_folder(kind, self.folder)
        (text, *_), (wanted, *_) = texts_of(self.folder), answers_to_file(folder)
        prediction = wanted["prediction"]
        with opened("--model_name_or_path", folder) as url:
            *found, read, milliseconds = client_of(url).predict(text, api_name="/answer")
        self.assertEqual(read, text)
        self.assertRegex(milliseconds, r"^\d+$")
        if kind in ("tokens", "entities"):
            (parts,) = found
            self.assertEqual("".join(part["token"] for part in parts), text)
            tagged = [(part["token"], part["class_or_confidence"]) for part in parts if part["class_or_confidence"]]
            if kind == "entities":
                self.assertEqual(tagged, [(span["text"], span["label"]) for span in prediction])
            else:
                words = [(word, tag) for part, tag in tagged for word in part.split()]
                self.assertEqual(words, [*zip(text.split(), prediction, strict=True)])
            return
        answer, *chances = found
        if kind == "number":
            self.assertEqual(float(answer), float(f"{prediction:.6g}"))
            return
        self.assertEqual(answer, prediction if kind == "class" else ", ".join(prediction))
        (chances,) = ({one["label"]: one["confidence"] for one in label["confidences"]} for label in chances)
        self.assertEqual(chances.keys(), wanted["probabilities"].keys())
        for name, chance in wanted["probabilities"].items():
            self.assertAlmostEqual(chances[name], chance, delta=1e-5)

    @unittest.skipUnless(ARE_THERE, NOT_THERE)
    def test_two_texts_are_compared(self):
        """By sentence-transformers' similarity of a query and a document."""
        from sentence_transformers import SentenceTransformer

        folder = head_folder("embedding", self.folder, source_prefix="find: ", max_source_length=16)
        one, *_, other = texts_of(self.folder)
        model = SentenceTransformer(str(folder), device="cpu")
        wanted = model.similarity(model.encode_query(one), model.encode_document(other)).item()
        with opened("--model_name_or_path", folder) as url:
            found, read, _ = client_of(url).predict(one, other, api_name="/answer")
        self.assertAlmostEqual(float(found), wanted, delta=1e-4)
        tokens, first = AutoTokenizer.from_pretrained(folder), read.splitlines()[0]
        ids = tokens(f"find: {one}")["input_ids"]
        cut = f" ... (cut: 16 of {len(ids)} tokens)" if len(ids) > 16 else ""
        self.assertEqual(first, tokens.decode(ids[:15]) + cut)

    def test_no_other_machine_is_asked(self):
        asked, connect, find = [], socket.socket.connect, socket.getaddrinfo

        def connecting(own, address):
            asked.append(address[0] if isinstance(address, tuple) else "a file")
            return connect(own, address)

        def finding(host, *args, **more):
            asked.append(host)
            return find(host, *args, **more)

        patched = mock.patch.object(socket.socket, "connect", connecting), mock.patch("socket.getaddrinfo", finding)
        fresh = mock.patch.dict(os.environ)
        with patched[0], patched[1], fresh, opened("--model_name_or_path", self.model()) as url:
            client_of(url).predict(*PAIRS[0], api_name="/answer")
            self.assertEqual(os.environ["GRADIO_ANALYTICS_ENABLED"], "False")
        self.assertStartsWith(url, "http://127.0.0.1:")
        self.assertContainsSubset({"127.0.0.1"}, asked)
        self.assertEmpty(set(asked) - {"127.0.0.1", "localhost", "a file"})

    def test_the_server_takes_texts_of_this_machine_and_nothing_else(self):
        """Asked as other pages, other names of this machine and strangers would; its folder is nobody else's."""
        places = mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder / "cache"))
        texts = json.dumps({"data": list(PAIRS[0])}).encode()
        upload = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + b"0" * 99 + b"\r\n--x--"
        as_files = {"Content-Type": "multipart/form-data; boundary=x"}
        call, web = "/gradio_api/call/answer", {"Content-Type": "application/json"}
        with places, opened("--model_name_or_path", self.model()) as url:
            host = urlsplit(url).netloc
            for path, body, headers, wanted in (
                ("/", None, {}, 200),
                (call, texts, web, 200),
                (call, texts, web | {"Origin": f"http://{host}"}, 200),
                (call, texts, web | {"Origin": "https://evil.example"}, 403),
                (call, texts, web | {"Origin": "null"}, 403),
                (call, texts, web | {"Host": "evil.example"}, 403),
                (call, texts, web | {"Host": "[::1"}, 400),
                (call, texts, web | {"Origin": "http://[::1"}, 400),
                ("/", None, {"Host": "evil.example:7860"}, 403),
                ("/gradio_api/upload", upload, as_files, 415),
                ("/gradio_api/upload", upload, as_files | {"Origin": f"http://{host}"}, 415),
                (call, texts, web | {"Content-Length": str(2**23)}, 413),
            ):
                with self.subTest(path=path, headers=headers):
                    request = urllib.request.Request(url.rstrip("/") + path, body, headers)
                    try:
                        with urllib.request.urlopen(request, timeout=60) as answer:
                            self.assertEqual(answer.status, wanted)
                    except urllib.error.HTTPError as error:
                        self.assertEqual(error.code, wanted, error.read())
            with self.assertRaisesRegex(Exception, "sentence1: 100,001 characters; a text has at most 100,000"):
                client_of(url).predict("x" * 100_001, "b", api_name="/answer")
        self.assertEqual((self.folder / "cache" / "t5_foundry" / "page").stat().st_mode & 0o777, 0o700)

    def test_a_page_for_others_answers_them(self):
        """Whoever sets GRADIO_SERVER_NAME lets others reach it, perhaps under names that this machine does not know."""
        outcomes = []

        async def app(*_):
            outcomes.append("answered")

        async def send(message):
            outcomes.append(message.get("status"))

        headers = [(b"host", b"me.hf.space"), (b"origin", b"https://huggingface.co")]
        for is_open in (True, False):
            scope = {"type": "http", "method": "GET", "headers": headers}
            asyncio.run(web_page.PageGuard(app, is_open)(scope, None, send))
        self.assertEqual(outcomes[:2], ["answered", 403])

    def test_in_a_browser(self):
        if not (shutil.which("chromedriver") and shutil.which("chromium")):
            self.skipTest("there is no chromium: apt-get install chromium chromium-driver")
        flags = ["--model_name_or_path", self.model(), "--max_new_tokens", 6]
        flags += ["--num_beams", 2, "--num_return_sequences", 2]
        wanted = self.of_file(*flags)
        with opened(*flags) as address, Browser() as browser:
            browser.ask("/url", url=address)
            browser.find("//*[contains(., 'rte sentence1: <sentence1> sentence2: <sentence2>')]")
            for name, text in zip(("sentence1", "sentence2"), PAIRS[0], strict=True):
                browser.ask(f"{browser.box(name)}/value", text=text)
            browser.ask(browser.find("//button[normalize-space()='Answer']") + "/click")
            end = time.monotonic() + 60
            while not browser.value("milliseconds") and time.monotonic() < end:
                time.sleep(0.05)
            self.assertEqual(browser.value("answer"), wanted[0]["prediction"])
            tokens = AutoTokenizer.from_pretrained(self.folder / "tuned")
            ids = tokens(f"rte sentence1: {PAIRS[0][0]} sentence2: {PAIRS[0][1]}")["input_ids"]
            self.assertEqual(browser.value("what the model read"), tokens.decode(ids[:-1]))
            browser.find("//*[@data-testid='label-output-value' and contains(., 'entailment')]")
            browser.find(f"//span[contains(., '{wanted[0]['n_best'][1]['log_probability']}')]")
            requested = browser.requested()
        self.assertIn(address, requested)
        outside = [url for url in requested if not url.startswith((address, "data:", "blob:"))]
        self.assertEmpty(outside)

    @parameterized.parameters(
        (["--input_file", "in.txt"], 1, "--input_file in.txt: .* --web"),
        (["--max_samples", "3"], 1, "--max_samples 3: .* --web"),
        ([], 2, "--web: one process answers"),
    )
    def test_refused(self, flags, processes, named):
        with mock.patch.dict(os.environ, {"WORLD_SIZE": str(processes), "RANK": "0"} if processes > 1 else {}):
            _, _, error = run_main(predict_t5.main, "--web", "--model_name_or_path", self.model(), *flags, code=2)
        self.assertRegex(error, named)

    def test_gradio_is_needed_by_the_page_alone(self):
        flags = ["--model_name_or_path", self.model(), "--max_new_tokens", 6]
        before = sys.modules.get("gradio")
        self.addCleanup(lambda: sys.modules.pop("gradio") if before is None else sys.modules.update(gradio=before))
        sys.modules["gradio"] = None
        self.assertLen(self.of_file(*flags), len(PAIRS))
        _, _, error = run_main(predict_t5.main, "--web", *flags, code=2)
        self.assertIn("--web True: needs gradio: pip install -r requirements/web.txt", error)

    def test_the_lines_for_spaces(self):
        """The Space's app.py, as docs/use.md gives it, in a folder with the model, as Spaces start it."""
        text = (ROOT / "docs" / "use.md").read_text()
        front, code = re.search(r"```yaml\n(---\n.*?---)\n```.*?```python\n(.*?)```", text, flags=re.DOTALL).groups()
        version = re.search(r"sdk_version: (.*)", front)[1]
        self.assertIn(f"gradio=={version}\n", (ROOT / "requirements" / "web.txt").read_text())
        self.assertIn("app_file: app.py\n", front)
        self.model().rename(self.folder / "model")
        import gradio

        pages, answers = [], []

        def blocked(page):
            pages.append((page.server_name, page.share))
            client = client_of(f"http://127.0.0.1:{page.server_port}")
            answers.append(client.predict(*PAIRS[0], api_name="/answer")[0])
            page.close(verbose=False)

        with contextlib.ExitStack() as stack:
            # What gradio reads of GRADIO_SERVER_NAME=0.0.0.0, which Spaces set, when it is imported.
            stack.enter_context(mock.patch("gradio.http_server.LOCALHOST_NAME", "0.0.0.0"))
            stack.enter_context(mock.patch.object(gradio.Blocks, "block_thread", blocked))
            stack.enter_context(contextlib.chdir(self.folder))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            exec(code, {"__name__": "__main__"})
        self.assertEqual(pages, [("0.0.0.0", False)])
        shutil.copytree(self.folder / "model", self.folder / "tuned")
        wanted = self.of_file("--model_name_or_path", self.folder / "tuned")
        self.assertEqual(answers, [wanted[0]["prediction"]])
