"""predict_t5.py --serve of encoders: embeddings are sentence-transformers', answers of heads those of predict_t5.py."""

import base64
import functools
import tempfile
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import openai
from absl.testing import parameterized
from head_folders import ARE_THERE, COLUMNS, NOT_THERE, answers_to_file, head_folder, texts_of
from helpers import run_main
from test_server import crowd
from test_server import served as server_of

import evaluate_t5
import export_checkpoint
import predict_t5

served = functools.partial(server_of, longest=None)


@unittest.skipUnless(ARE_THERE, NOT_THERE)
class EncodersTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.place = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        head_folder("embedding", cls.place, source_prefix="find: ")
        cls.texts = texts_of(cls.place)

    def alike(self, found: list[dict], expected: list[dict]) -> None:
        for one, other in zip(found, expected, strict=True):
            self.assertEqual(names_of(one), names_of(other))
            np.testing.assert_allclose(numbers_of(one), numbers_of(other), atol=1e-5)

    def test_embeddings_are_those_of_sentence_transformers(self):
        """By OpenAI's client, from several threads, alone and in a list, in both formats; a query with its prompt."""
        from sentence_transformers import SentenceTransformer

        folder = self.place / "embedding"
        own = SentenceTransformer(str(folder), device="cpu")
        wanted = own.encode(self.texts)
        with served("--model_name_or_path", folder, "--max_wait_ms", 50) as it, ThreadPoolExecutor(8) as clients:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{it.port}/v1", api_key="any", max_retries=0)
            self.addCleanup(client.close)
            (about,) = client.models.list().data
            self.assertEqual((about.id, about.kind, about.dimensions), ("embedding", "embedding", wanted.shape[1]))

            def embeddings(given: object, **more: object) -> np.ndarray:
                found = client.embeddings.create(model=about.id, input=given, **more)
                self.assertEqual([one.index for one in found.data], list(range(len(found.data))))
                return np.array([one.embedding for one in found.data])

            alone = list(clients.map(embeddings, self.texts))
            np.testing.assert_allclose(np.concatenate(alone), wanted, atol=1e-6)
            self.assertLess(sum(it.service.counters.batches.counts), len(self.texts))
            np.testing.assert_allclose(embeddings(self.texts), wanted, atol=1e-6)
            np.testing.assert_allclose(embeddings(self.texts, encoding_format="float"), wanted, atol=1e-6)
            for kind, encode in (("query", own.encode_query), ("document", own.encode_document)):
                found = embeddings(self.texts[:9], extra_body={"input_type": kind}, dimensions=wanted.shape[1])
                np.testing.assert_allclose(found, encode(self.texts[:9]), atol=1e-6)
            self.assertGreater(np.abs(own.encode_query(self.texts[:9]) - wanted[:9]).max(), 1e-3)
            self.assertEqual(embeddings(["a"] * 2048).shape, (2048, wanted.shape[1]))
            status, answer = it.ask("/v1/embeddings", {"input": self.texts[0], "encoding_format": "base64"})
            self.assertEqual((status, answer["object"]), (200, "list"))
            (one,) = answer["data"]
            numbers = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
            np.testing.assert_allclose(numbers, wanted[0], atol=1e-6)
            read = len(own.tokenizer(self.texts[0])["input_ids"])
            self.assertEqual(answer["usage"], {"prompt_tokens": read, "total_tokens": read})

    def test_an_export_for_sentence_transformers(self):
        """Embeds as the package does, with our files or with those that it writes itself."""
        from sentence_transformers import SentenceTransformer

        export = ["--output_dir", self.folder / "out", "--formats", "sentence_transformers"]
        run_main(export_checkpoint.main, "--model_name_or_path", self.place / "base", *export)
        folder, texts = self.folder / "out" / "sentence_transformers", self.texts[:20]
        own = SentenceTransformer(str(folder), device="cpu")
        own.save(str(self.folder / "saved"))
        for place in (folder, self.folder / "saved"):
            with served("--model_name_or_path", place) as it:
                status, answer = it.ask("/v1/embeddings", {"input": texts})
                self.assertEqual(status, 200, answer)
                np.testing.assert_allclose([one["embedding"] for one in answer["data"]], own.encode(texts), atol=1e-6)
                self.assertEqual(it.ask("/v1/models")[1]["data"][0]["max_source_tokens"], 512)
        flags = ["--model_name_or_path", folder, "--input_file", self.place / "rows.jsonl"]
        self.assertIn("SentenceTransformer(folder).encode embeds", run_main(predict_t5.main, *flags, code=2)[2])
        error = run_main(evaluate_t5.main, "--model_name_or_path", folder, code=2)[2]
        self.assertIn("sentence_transformers: has no task.json that says what is evaluated", error)
        for name, text, message in (
            ("1_Pooling/config.json", "[]", "sentence_transformers: sentence-transformers cannot load it"),
            ("1_Pooling/config.json", "\0", "sentence_transformers: sentence-transformers cannot load it"),
            ("sentence_bert_config.json", "[1]", "sentence_bert_config.json holds no JSON object: [1]"),
            ("modules.json", "[{}]", "modules.json: must give a path and a type for each module, not {}"),
            ("modules.json", "[", "modules.json cannot be read: "),
        ):
            whole = (folder / name).read_text()
            (folder / name).write_text(text)
            _, _, error = run_main(predict_t5.main, "--serve", "--use_cpu", "--model_name_or_path", folder, code=2)
            self.assertIn(message, error)
            (folder / name).write_text(whole)

    def test_wrong_requests_get_one_line(self):
        """What all requests have in common: test_server.py."""
        folder, ids = self.place / "embedding", r"^input\[0\]: .* token ids"
        with served("--model_name_or_path", folder, "--max_source_length", 8, "--max_queue", 4) as it:
            for body, status, named in (
                ({"input": []}, 400, "^input: .* empty"),
                ({"input": ["a", " "]}, 400, r"^input\[1\]: .* empty"),
                ({"input": [1, 2]}, 400, ids),
                ({"input": [[1, 2]]}, 400, ids),
                ({"input": {"text": "a"}}, 400, "^input: .* text"),
                (b'{"input": "\\ud800"}', 400, "^input "),
                ({"input": "a", "model": "other"}, 404, "other: .* embedding"),
                ({"input": "a", "dimensions": 3}, 400, r"^dimensions 3: .* \d+"),
                ({"input": "a", "encoding_format": "int8"}, 400, "^encoding_format: .* 'float'"),
                ({"input": "a", "input_type": "passage"}, 400, "^input_type: .* 'query' or 'document'"),
                ({"input": ["a", "yes no " * 40]}, 400, r"^input\[1\]: .* \d+ tokens, .* 8"),
                ({"input": ["a"] * 5}, 400, "^input: .* 5 texts, .* 4 "),
            ):
                with self.subTest(named):
                    found, answer = it.ask("/v1/embeddings", body)
                    self.assertEqual(found, status, answer)
                    self.assertRegex(answer["error"]["message"], named)
            for path in ("/v1/completions", "/v1/classify"):
                status, answer = it.ask(path, {"input": "a"})
                self.assertEqual(status, 404)
                self.assertRegex(answer["error"]["message"], f"^{path}: .* /v1/embeddings")
            self.assertEqual(it.ask("/v1/embeddings", {"input": "a"})[0], 200)
            self.assertIn('t5_requests_total{status="404"} 1\n', it.ask("/metrics")[1])
        with served("--model_name_or_path", folder, "--max_source_length", 8, "--cut_sources") as it:
            (one,) = it.ask("/v1/embeddings", {"input": "yes no " * 40})[1]["data"]
            self.assertGreater(one["cut_from"], 40)

    @parameterized.parameters("class", "labels", "number", "tokens", "entities")
    def test_a_head_answers_as_predict_t5_does(self, kind):
        folder, column = head_folder(kind, self.place), COLUMNS[kind][0]
        wanted, reads_words = answers_to_file(folder), column == "words"
        with served("--model_name_or_path", folder, "--max_wait_ms", 50) as it, ThreadPoolExecutor(8) as clients:

            def classify(given: object) -> list[dict]:
                status, answer = it.ask("/v1/classify", {"input": given, "model": kind})
                self.assertEqual(status, 200, answer)
                self.assertEqual([one.pop("index") for one in answer["data"]], list(range(len(answer["data"]))))
                self.assertStartsWith(answer["id"], "classify-")
                return answer["data"]

            self.alike([one for of_text in clients.map(classify, self.texts) for one in of_text], wanted)
            self.alike(classify(self.texts), wanted)
            self.alike(classify({column: self.texts[0]}), wanted[:1])
            if reads_words:
                self.alike(classify([{"words": text.split()} for text in self.texts[:5]]), wanted[:5])
            (about,) = it.ask("/v1/models")[1]["data"]
            labels = {"class": ["False", "True"], "number": None, "entities": ["O", "B-A", "I-A"]}.get(kind, ["C", "V"])
            self.assertEqual((about["inputs"], about["labels"]), ([column], labels))
            for given, message in (
                ({"other": "a"}, f"input: must be a text, an object with the columns {column}"),
                ({column: None}, f"input: {column} must be a text or a number"),
                ([], "input: is an empty list"),
                (["\u00a0"], r"input\[0\]: is an empty text"),
                ({column: ["a b"]}, "input: words has the word 'a b'.* space" if reads_words else "input: "),
            ):
                status, answer = it.ask("/v1/classify", {"input": given})
                self.assertEqual(status, 400)
                self.assertRegex(answer["error"]["message"], message)

    @parameterized.parameters(("embedding", "/v1/embeddings"), ("tokens", "/v1/classify"))
    def test_requests_of_all_kinds_at_once(self, kind, path):
        refused = [
            (400, {"input": []}),
            (400, {"input": "a", "n": 2}),
            (400, b"{"),
            (400, {"input": "abc" + ".," * 3000}),
        ]
        bodies = [{"input": given} for given in (*self.texts[:6], self.texts[:9], "abc" + ".," * 30)]
        with served("--model_name_or_path", head_folder(kind, self.place)) as it:
            crowd(self, it, path, bodies, refused, lambda found, alone: self.alike(found["data"], alone["data"]))

    def test_tags_have_the_places_of_their_words(self):
        with served("--model_name_or_path", head_folder("tokens", self.place)) as it:
            (one,) = it.ask("/v1/classify", {"input": "Ka, don't  go"})[1]["data"]
        # Of the words in training, no mark is one of its own.
        self.assertEqual(["Ka, don't  go"[slice(*place)] for place in one["offsets"]], ["Ka,", "don't", "go"])
        self.assertLen(one["prediction"], 3)

    def test_a_text_that_is_too_long_is_refused_before_its_words_are_looked_for(self):
        with (
            served("--model_name_or_path", head_folder("tokens", self.place)) as it,
            mock.patch("features.encoder_heads.word_division.Division.places") as places,
        ):
            status, answer = it.ask("/v1/classify", {"input": "abc" + "." * 3000})
        self.assertEqual(status, 400)
        self.assertRegex(answer["error"]["message"], r"input: has at least \d+ tokens, .* at most 512")
        places.assert_not_called()

    def test_the_end_and_a_model_that_fails(self):
        """What was taken is answered; new requests get 503. A failure is told, and ends nothing."""
        begun, goes_on = threading.Event(), threading.Event()
        with served("--model_name_or_path", head_folder("class", self.place), "--max_wait_ms", 0) as it:
            batches, encoder = it.service.batches, it.service.encoder

            def held(inputs: list) -> list:
                begun.set()
                self.assertTrue(goes_on.wait(60))
                return encoder.answer(inputs)

            batches.engine = encoder._replace(answer=mock.Mock(side_effect=RuntimeError("no memory")))
            with mock.patch("traceback.print_exc") as printed:
                self.assertEqual(it.ask("/v1/classify", {"input": "a"})[0], 500)
            printed.assert_called_once()
            batches.engine = encoder._replace(answer=held)
            with ThreadPoolExecutor(1) as clients:
                first = clients.submit(it.ask, "/v1/classify", {"input": "a"})
                self.assertTrue(begun.wait(60))
                it.service.ends = True
                self.assertEqual(it.ask("/v1/classify", {"input": "a"})[0], 503)
                goes_on.set()
                self.assertEqual(first.result()[0], 200)

    @parameterized.parameters(
        (["--input_file", "in.txt"], "--input_file in.txt: is for the inputs of a file, which --serve replaces"),
        (["--num_beams", "2"], "--num_beams 2: a head writes no text"),
        (["--web"], "--serve: excludes --web"),
    )
    def test_flags_that_do_not_go_together(self, flags, message):
        folder = head_folder("class", self.place)
        _, _, error = run_main(predict_t5.main, "--serve", "--model_name_or_path", folder, *flags, code=2)
        self.assertIn(message, error)


def names_of(found: object) -> object:
    """An answer without its numbers and the places of its words."""
    if isinstance(found, dict):
        return {name: names_of(value) for name, value in found.items() if name != "offsets"}
    return [*map(names_of, found)] if isinstance(found, list) else 0.0 if isinstance(found, float) else found


def numbers_of(found: object) -> list[float]:
    """The numbers of an answer."""
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else []
    return [found] if isinstance(found, float) else [number for part in parts for number in numbers_of(part)]
