"""foundry/modeling/ensemble.py: several models answer with the mean of their probabilities, in all scripts."""

import atexit
import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import zoo
from absl.testing import parameterized
from helpers import SHAPE, run_main, write_tiny_model
from test_decoding import ENDS, RULES, made_model, made_sources
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, T5ForConditionalGeneration
from transformers.modeling_outputs import Seq2SeqLMOutput

import evaluate_t5
import predict_t5
from foundry.common.errors import UserError
from foundry.common.reports import write_json
from foundry.model_t5 import build_config, create_model, load_model
from foundry.modeling import decoding
from foundry.modeling.decoding import Source
from foundry.modeling.ensemble import ensemble
from foundry.modeling.found_answers import AnswerFinder
from foundry.modeling.rows_at_a_time import rows_to_generate
from tasks.evaluation_jobs import default_output_dir

SEARCHES = [
    ("greedy", dict()),
    ("greedy_rules", dict(repetition_penalty=1.4, min_new_tokens=4, suppress_tokens=[5, 7])),
    ("beams", dict(num_beams=4, num_return_sequences=4, length_penalty=0.6)),
    ("long_beams", dict(num_beams=4, num_return_sequences=2, length_penalty=2.0, eos_token_id=1)),
    ("early_beams", dict(num_beams=4, early_stopping=True, length_penalty=0.2)),
]
# Rules that multiply logits see those of a single model, and of an ensemble log-probabilities.
MULTIPLYING = ("repetition", "decay")


def made_models() -> list:
    """One, another family of another size, and one of the first's sizes with other weights."""
    models = [made_model(), made_model("umt5", num_layers=3, num_decoder_layers=1, d_model=24), made_model()]
    for parameter in models[2].parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return models


class Mean(T5ForConditionalGeneration):
    """The reference, for `generate`: a whole forward pass of each model for each token, without a cache."""

    def forward(self, attention_mask=None, encoder_outputs=None, decoder_input_ids=None, **_):  # noqa: ARG002
        read = self.source.expand(len(decoder_input_ids), -1)
        return Seq2SeqLMOutput(logits=log_mean(self.models, read, decoder_input_ids).float())


def log_mean(models: Sequence, read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """log of the mean of probabilities [B, T, V] in float64, of sources [B, S] and what was written behind them."""
    found = [model(input_ids=read, decoder_input_ids=written).logits for model in models]
    return torch.stack([logits.double().softmax(-1) for logits in found]).mean(0).log()


def log_probs(models: Sequence, source: list[int], tokens: list[int]) -> torch.Tensor:
    """[T, V] by teacher forcing."""
    return log_mean(models, torch.tensor([source]), torch.tensor([[0, *tokens[:-1]]]))[0]


def generated(models: Sequence, source: list[int], **settings: object) -> tuple[list[list[int]], list[float] | None]:
    """(the answers that `generate` finds by the reference, up to their ends; the scores of beams)."""
    wrapped, end = copy.deepcopy(models[0]), settings.get("eos_token_id", ENDS)
    wrapped.__class__, wrapped.models, wrapped.source = Mean, list(models), torch.tensor([source])
    how = dict(do_sample=False, use_cache=False, return_dict_in_generate=True, output_scores=True)
    output, answers = wrapped.generate(wrapped.source, **settings, **how), []
    for tokens in output.sequences[:, 1:].tolist():
        ends = [place for place, token in enumerate(tokens) if token in (end if isinstance(end, list) else [end])]
        answers.append(tokens[: ends[0] + 1] if ends else tokens)
    return answers, output.sequences_scores.tolist() if "num_beams" in settings else None


def found(models: Sequence, sources: list[Source], slots: int = 4, **settings: object) -> list[Source]:
    """The sources, answered by the ensemble of copies of the models."""
    joined = ensemble([copy.deepcopy(one) for one in models])
    AnswerFinder(joined, slots).find(sources, scored=True, **dict(do_sample=False, max_new_tokens=12) | settings)
    return sources


def tokens_of(sources: list[Source]) -> list[list[int]]:
    return [answer.tokens for source in sources for answer in source.answers]


def made(count: int, draws: torch.Tensor | None = None) -> list[Source]:
    return [Source(ids, draws=None if draws is None else draws[n]) for n, ids in enumerate(made_sources(count))]


class EnsembleTest(parameterized.TestCase):
    @parameterized.named_parameters(*((name, search) for name, search in SEARCHES))
    def test_the_answers_are_those_of_generate_over_the_mean(self, search):
        """Token for token, and of beams with their scores, alone and in batches."""
        models = made_models()
        wanted = [generated(models, ids, max_new_tokens=12, **search) for ids in made_sources(7)]
        for slots in (1, 4):
            for source, (answers, scores) in zip(found(models, made(7), slots, **search), wanted, strict=True):
                self.assertEqual([answer.tokens for answer in source.answers], answers)
                for number, answer in enumerate(source.answers):
                    length = len(answer.tokens)
                    nats = log_probs(models, source.ids, answer.tokens)[range(length), answer.tokens].sum().item()
                    self.assertAlmostEqual(answer.nats, nats, delta=1e-5)
                    if scores:
                        score = answer.nats / length ** search["length_penalty"]
                        self.assertAlmostEqual(score, scores[number], delta=1e-5)

    def test_tokens_are_drawn_from_the_mean_under_a_temperature_and_the_likeliest(self):
        """Temperature and top-k come behind the mean: the first token whose cumulated probability is larger."""
        models = made_models()
        draws = torch.rand(3, 2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        settings = dict(do_sample=True, num_return_sequences=2, temperature=1.5, top_k=9)
        for source in found(models, made(3, draws), **settings):
            for numbers, answer in zip(source.draws, source.answers, strict=True):
                scores = log_probs(models, source.ids, answer.tokens) / 1.5
                scores[scores < scores.topk(9).values[:, -1:]] = -torch.inf
                sums = scores.softmax(-1).cumsum(-1)
                wanted = sums.gt(numbers[: len(answer.tokens), None]).int().argmax(-1)
                self.assertEqual(answer.tokens, wanted.tolist())

    @parameterized.named_parameters(*(rule for rule in RULES if rule[0] not in MULTIPLYING))
    def test_a_model_with_itself_answers_as_alone(self, search):
        model = made_model()
        alone, twice = (found(models, made(7), **search) for models in ([model], [model, model]))
        self.assertEqual(tokens_of(twice), tokens_of(alone))
        for one, other in zip(alone, twice, strict=True):
            for answer, again in zip(one.answers, other.answers, strict=True):
                self.assertAlmostEqual(answer.nats, again.nats, delta=1e-5)

    @parameterized.parameters(dict(), dict(num_beams=4, num_return_sequences=4))
    def test_the_order_of_the_models_does_not_matter(self, **search):
        models, wanted = made_models(), None
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            answers = tokens_of(found([models[place] for place in order], made(7), **search))
            self.assertEqual(answers, wanted or answers)
            wanted = answers
        self.assertNotEqual(wanted, tokens_of(found(models[:1], made(7), **search)))

    def test_given_answers_have_the_mean_of_their_probabilities(self):
        models, source, texts = made_models(), made_sources(1)[0], torch.tensor([[7, 5, 1, -100], [9, 8, 20, 1]])
        scores = AnswerFinder(ensemble(list(map(copy.deepcopy, models))), 1).score(source, texts)
        for row, tokens in zip(scores, ([7, 5, 1], [9, 8, 20, 1]), strict=True):
            wanted = log_probs(models, source, tokens)[range(len(tokens)), tokens]
            torch.testing.assert_close(row[: len(tokens)].double(), wanted, atol=1e-5, rtol=0)

    @parameterized.parameters(1, 3)
    def test_known_outputs_of_the_encoders_are_taken(self, count):
        """As an evaluation knows them, which has scored the targets before: no source is encoded again."""
        models, sources = made_models()[:count], made(5)
        joined = ensemble(list(map(copy.deepcopy, models)))
        for source in sources:
            ids = torch.tensor([source.ids])
            encoded = joined(input_ids=ids, decoder_input_ids=torch.zeros(1, 1, dtype=torch.long))
            source.encoded = torch.nn.functional.pad(
                encoded.encoder_last_hidden_state[0], (0, 0, 0, 32 - len(source.ids))
            )
        with mock.patch.object(decoding.Layers, "encoded", side_effect=AssertionError):
            AnswerFinder(joined, 3).find(sources, do_sample=False, max_new_tokens=12)
        self.assertEqual(tokens_of(sources), tokens_of(found(models, made(5))))

    def test_one_model_is_left_as_it_is(self):
        model = made_model()
        self.assertIs(ensemble([model]), model)
        self.assertNotIn("forward", vars(model))
        with mock.patch.object(decoding, "log_of_mean", side_effect=AssertionError):
            AnswerFinder(model, 4).find(made(3), do_sample=False, max_new_tokens=12)

    def test_the_caches_of_all_models_must_have_room(self):
        shape = dict(d_model=8, d_kv=4, num_heads=2, num_layers=1)
        small, large = (AutoConfig.for_model("t5", **shape, num_decoder_layers=layers) for layers in (1, 3))
        rows = []
        with mock.patch("foundry.modeling.rows_at_a_time.available_memory", return_value=2**20):
            for configs in ([small], [small, large]):
                rows.append(rows_to_generate(configs, 10, 6, 1, torch.device("cpu"), False))
        # 20 % of the memory, by two tensors of 8 numbers, of 4 bytes, for each of 16 tokens and 1 or 1 + 3 layers
        self.assertEqual(rows, [204, 51])

    @parameterized.parameters(
        (dict(no_repeat_ngram_size=2), "no_repeat_ngram_size"), (dict(eos_token_id=1), "eos_token_id")
    )
    def test_other_settings_of_generation_are_refused(self, settings, name):
        models = made_models()
        models[1].generation_config.update(**settings)
        with self.assertRaisesRegex(UserError, f"--model_name_or_path .*{name}"):
            ensemble(models)

    def test_what_our_loop_lacks_is_refused(self):
        """Before anything is answered, and for settings of a call: `generate` is not asked in silence."""
        gemma = made_model("t5gemma")
        with self.assertRaisesRegex(UserError, "--model_name_or_path .*t5gemma"):
            AnswerFinder(ensemble([gemma, copy.deepcopy(gemma)]), 1)
        joined, setting = ensemble(made_models()), dict(encoder_no_repeat_ngram_size=2)
        with self.assertRaisesRegex(UserError, "--model_name_or_path .*encoder_no_repeat_ngram_size"):
            AnswerFinder(joined, 1, search=setting)
        with self.assertRaisesRegex(UserError, "--model_name_or_path .*encoder_no_repeat_ngram_size"):
            AnswerFinder(joined, 1).find(made(1), **setting)


LABELS = ["fox", "no", "yes"]
LINES = [f"{'very ' * (n % 5)}old fox number {n}" for n in range(23)]
WORDS = [LABELS[n % 3] for n in range(23)]
PAIRS = ("--source_column", "q", "--target_column", "a", "--max_target_length", 6)


@functools.cache
def folders() -> list[str]:
    """Two models of unlike sizes with one tokenizer, each of which has learnt most of WORDS, and a few wrong ones."""
    place = Path(tempfile.mkdtemp(prefix="t5_foundry_ensemble_"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    one, two = place / "one", place / "two"
    write_tiny_model(one, [*LINES, *(f"answer {n} yes no" for n in range(99))], 153)
    tokenizer = AutoTokenizer.from_pretrained(one)
    tokenizer.save_pretrained(two)
    torch.manual_seed(1)
    larger = create_model(build_config("tiny", len(tokenizer), SHAPE | dict(num_layers=3, d_model=24)))
    for folder, model, wrong in ((one, load_model(str(one)), 0), (two, larger, 8)):
        words = [*WORDS[:wrong], *WORDS[wrong + 1 : wrong + 8], *WORDS[wrong + 7 :]]
        labels = tokenizer(words, padding=True, return_tensors="pt")["input_ids"]
        batch = tokenizer(LINES, padding=True, return_tensors="pt") | dict(labels=labels.masked_fill(labels == 0, -100))
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
        for _ in range(60):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval().save_pretrained(folder)
    return [str(one), str(two)]


def loaded() -> tuple[list, list[list[int]]]:
    """(the models, the tokens of LINES)."""
    models = [AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders()]
    return models, AutoTokenizer.from_pretrained(folders()[0])(LINES)["input_ids"]


class ScriptsTest(parameterized.TestCase):
    def in_words(self, answers: list[list[int]]) -> list[str]:
        texts = AutoTokenizer.from_pretrained(folders()[0]).batch_decode(answers, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def copied(self) -> list[Path]:
        """The two folders, to be changed."""
        return [shutil.copytree(folder, self.folder / Path(folder).name) for folder in folders()]

    def predict(self, *flags: object, code: int | None = None) -> tuple[list[dict], str]:
        """(the lines written, what was printed)."""
        texts, out = self.folder / "in.txt", self.folder / "answers.jsonl"
        texts.write_text("\n".join(LINES))
        files = ("--input_file", texts, "--output_file", out, "--max_new_tokens", 6, "--use_cpu")
        _, printed, error = run_main(predict_t5.main, *flags, *files, code=code)
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else [], printed + error

    @parameterized.parameters(("max_source_length", 3, 4), ("max_target_length", 3, 4), ("source_prefix", "a: ", "b: "))
    def test_flags_stand_in_for_what_two_records_do_not_share(self, name, *values):
        """The same answers as those of folders without a record."""
        models = self.copied()
        flags = ("--model_name_or_path", *models, "--max_source_length", 9, "--source_prefix", "")
        wanted, _ = self.predict(*flags)
        (self.folder / "answers.jsonl").unlink()
        for folder, value in zip(models, values, strict=True):
            record = dict(benchmark="own", dataset_name="pairs", source_column=["q"], target_column=["a"])
            write_json(folder / "task.json", record | {"target_type": "text", name: value})
        self.assertEqual(self.predict(*flags)[0], wanted)

    def test_predictions(self):
        """Of a recipe's list of models; answers are continued while the weights of all are the same."""
        (one, two), recipe = self.copied(), self.folder / "recipe.yaml"
        recipe.write_text(f"model_name_or_path: [{one}, {two}]\nnum_beams: 3\nnum_return_sequences: 2\n")
        rows, printed = self.predict(recipe)
        models, sources = loaded()
        for row, ids in zip(rows, sources, strict=True):
            wanted, _ = generated(models, ids, max_new_tokens=6, num_beams=3, num_return_sequences=2, eos_token_id=1)
            self.assertEqual([answer["prediction"] for answer in row["n_best"]], self.in_words(wanted))
            for answer, tokens in zip(row["n_best"], wanted, strict=True):
                nats = log_probs(models, ids, tokens)[range(len(tokens)), tokens].sum().item()
                self.assertAlmostEqual(answer["log_probability"], nats, delta=1e-3)
        self.assertRegex(printed, f"model +{one} \\+ {two} .*, transformers\n")
        settings = json.loads((self.folder / "answers.jsonl.settings.json").read_text())
        self.assertEqual(settings["model_name_or_path"], [str(one), str(two)])
        models[1].lm_head.weight.data.mul_(-1)
        models[1].save_pretrained(two)
        self.assertIn("holds answers with weights", self.predict(recipe, code=2)[1])

    @parameterized.parameters(("text", 1), ("text", 3), ("class", 1))
    def test_evaluations(self, kind, beams):
        """The loss is that of the mean; answers are searched in it, and a class is predicted where the mean finds each
        of its tokens the likeliest."""
        pairs, out = self.folder / "pairs.csv", self.folder / "out"
        pairs.write_text("q,a\n" + "".join(f"{line},{word}\n" for line, word in zip(LINES, WORDS, strict=True)))
        flags = [*PAIRS, "--target_type", kind, "--validation_file", pairs, "--output_dir", out, "--use_cpu"]
        flags += ["--labels", *LABELS] if kind == "class" else ["--generation_num_beams", beams]
        results, printed, _ = run_main(evaluate_t5.main, "--model_name_or_path", *folders(), *flags)
        (models, sources), nats, wanted = loaded(), [], []
        search = dict(max_new_tokens=6, eos_token_id=1) | (dict(num_beams=beams) if beams > 1 else {})
        for ids, word in zip(sources, WORDS, strict=True):
            target = AutoTokenizer.from_pretrained(folders()[0])(word)["input_ids"]
            nats += log_probs(models, ids, target)[range(len(target)), target].tolist()
            wanted += self.in_words(generated(models, ids, **search)[0])
        if kind == "class":
            wanted = [word if word in LABELS else "" for word in wanted]
        rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
        self.assertEqual([row["prediction"] for row in rows], wanted)
        self.assertAlmostEqual(results["eval_loss"], -sum(nats) / len(nats), delta=1e-4)
        self.assertIn(" + ".join(folders()), printed)
        if beams == 1:
            right = [found == word for found, word in zip(wanted, WORDS, strict=True)]
            self.assertBetween(sum(right), 6, 22)
            alone = [self.in_words(generated([model], ids, **search)[0])[0] for model in models for ids in sources]
            self.assertNotIn(wanted, (alone[:23], alone[23:]))

    @parameterized.parameters(
        ("vocab_size", "vocab_size, .* and 160"),
        ("start", "decoder_start_token_id, .* 0 and 5"),
        ("piece", "piece 20 of the tokenizer"),
        ("rule", "rules of the tokenizer"),
        ("prefix", "source_prefix in task.json"),
        ("beams", "num_beams"),
        ("gemma", "t5gemma"),
        ("head", "writes no text"),
        ("missing", "no such folder|not a folder"),
    )
    def test_models_that_cannot_answer_together(self, change, named):
        """One line names the folders and the difference; nothing is written."""
        one, two = self.copied()
        config, tokenizer = json.loads((two / "config.json").read_text()), two / "tokenizer.json"
        if change == "vocab_size":
            config["vocab_size"] = 160
        elif change == "start":
            config["decoder_start_token_id"] = 5
        elif change == "gemma":
            config = zoo.config_of("t5gemma", config["vocab_size"])
        elif change == "piece":
            content = json.loads(tokenizer.read_text())
            content["model"]["vocab"][20][0] += "x"
            tokenizer.write_text(json.dumps(content))
        elif change == "rule":
            content = json.loads(tokenizer.read_text())
            content["normalizer"] = {"type": "Lowercase"}
            tokenizer.write_text(json.dumps(content))
        elif change == "prefix":
            for folder, prefix in ((one, "say: "), (two, "write: ")):
                record = dict(benchmark="own", dataset_name="pairs", source_prefix=prefix, target_type="text")
                record |= dict(source_column=["q"], target_column=["a"])
                (folder / "task.json").write_text(json.dumps(record))
        elif change == "beams":
            (two / "generation_config.json").write_text(json.dumps(dict(num_beams=3)))
        elif change == "head":
            (two / "modules.json").write_text("[]")
        elif change == "missing":
            shutil.rmtree(two)
        if two.exists():
            (two / "config.json").write_text(json.dumps(config))
        rows, error = self.predict("--model_name_or_path", one, two, code=2)
        self.assertRegex(error.splitlines()[-1], f"error: --model_name_or_path .*{two}.*({named})")
        self.assertEqual(rows, [])

    @parameterized.parameters(
        (predict_t5, ("--backend", "ctranslate2"), "--backend ctranslate2"),
        (predict_t5, ("--load_in_8bit",), "held in int8"),
        (evaluate_t5, ("--validation_file", "{}/in.txt"), "text is scored by one model"),
    )
    def test_what_one_model_alone_can_do(self, script, flags, named):
        (self.folder / "in.txt").write_text("a text")
        models = self.copied()
        write_json(models[0] / "run.json", {"arguments": {"objective": "span_corruption"}})
        flags = [flag.format(self.folder) for flag in flags]
        if script is predict_t5:
            flags += ["--input_file", self.folder / "in.txt"]
        _, _, error = run_main(script.main, "--model_name_or_path", *models, *flags, "--use_cpu", code=2)
        self.assertRegex(error.splitlines()[-1], named)

    def test_the_results_of_an_ensemble_lie_in_no_model_s_folder(self):
        jobs = [SimpleNamespace(models=folders(), model=folders()[0], task=SimpleNamespace(name="pairs"))]
        args = SimpleNamespace(do_predict=False), SimpleNamespace(dataset_name="pairs")
        found = default_output_dir(jobs, SimpleNamespace(split=None), args[1], args[0])
        self.assertEqual(found, Path("out/eval_pairs"))
