"""Every family in its published layout, from its files through all scripts and back into plain transformers.

The zoo (support/zoo.py) is made at test time. Of each animal: what its files say, continued pre-training of four steps,
the same resumed after two, fine-tuning on labels, evaluation by generating, and exports of both.
"""

import contextlib
import functools
import io
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch
import zoo
from absl.testing import parameterized
from helpers import OLDER_TRANSFORMERS, SMALL_RUN, run_main
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import constants
import evaluate_t5
import export_checkpoint
import fine_tune_t5
import pre_train_t5
from data_collator_t5 import find_sentinel_ids
from foundry.corpora.tokenizers import load_tokenizer, plain_encoder
from foundry.features import NO_FEATURES
from foundry.model_t5 import load_model, load_to_answer
from foundry.modeling.families import is_tied
from foundry.objectives.spans import SpanCorruption

LABELS = ["bread", "moon"]
TASK = dict(
    prefix="topic",
    inputs={"sentence": "line"},
    target="topic",
    target_type="class",
    labels=LABELS,
    metrics=["accuracy"],
    files={"train": "train.jsonl", "validation": "dev.jsonl"},
    max_source_length=96,
    max_target_length=8,
)
ROOT = Path(constants.__file__).parent
TIED = ("t5_v1_0", *zoo.GEMMA)  # their heads are embeddings
EMBEDDINGS = {"t5gemma": {"model.encoder", "model.decoder"}, "t5gemma2": {"model.encoder.text_model"}}
SMALL = SMALL_RUN | dict(per_device_train_batch_size=2, per_device_eval_batch_size=4, seed=1, max_eval_samples=4)
ODD_TEXTS = ("Té 😀", "中文 漢字", "one\ntwo", "ABC Abc", "12,345 6", "  two  spaces ", "<0x0A>")
ODD_TEXTS += ("ＡＢ，", "e\u0301", "")
MADE_FOR_TEXT = ("<extra_id_3>", "▁<extra_id_3>", "a <extra_id_0>b", "</s> <pad>")


@functools.cache
def place() -> Path:
    """A folder with the text, and the task's rows."""
    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("\n".join(zoo.lines()) + "\n")
    for split in ("train", "dev"):
        rows = [{"line": line, "topic": LABELS[n % 2]} for n, line in enumerate(zoo.lines()[:8])]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@functools.cache
def animal(family: str) -> tuple[Path, int]:
    """(its folder, the words of its vocabulary)."""
    folder = place() / "published" / family
    return folder, zoo.write_checkpoint(folder, family)


def script(module, *switches, **flags) -> tuple[object, str]:
    """(what main returns, what it printed)."""
    if module in (pre_train_t5, fine_tune_t5):
        flags = SMALL | {"data_cache_dir": place() / "cache"} | flags
    result, printed, _ = run_main(module.main, *[f"--{key}={value}" for key, value in flags.items()], *switches)
    return result, printed


def pre_train(source: Path, output_dir: Path, *switches, **changes) -> tuple[dict, str]:
    flags = dict(model_name_or_path=source, train_file=place() / "text.txt", dataset_name="", output_dir=output_dir)
    flags |= dict(input_seq_length=64, max_steps=4, mean_noise_span_length=6, learning_rate=1e-3)
    flags |= dict(eval_steps=4, save_steps=2, validation_split_count=30, num_samples=1)
    return script(pre_train_t5, *switches, **flags | changes)


@functools.cache
def pre_trained(family: str) -> tuple[Path, dict]:
    """(the folder of a run of four steps that kept its checkpoints, its results)."""
    folder = place() / "pre_trained" / family
    return folder, pre_train(animal(family)[0], folder)[0]


@functools.cache
def fine_tuned(family: str) -> Path:
    """Three steps on the task, from the pre-trained folder; scored by teacher forcing."""
    folder = place() / "fine_tuned" / family
    flags = dict(benchmark="zoo", dataset_name="topic", data_dir=place(), model_name_or_path=pre_trained(family)[0])
    with mock.patch.dict(constants.DATASET_VALS, zoo={"topic": TASK}):
        results, _ = script(fine_tune_t5, **flags, max_steps=3, output_dir=folder, learning_rate=1e-3)
    assert 0 <= results["eval_accuracy"] <= 1
    return folder


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, attention_mask=ids.ne(0).long(), decoder_input_ids=ids[:, :7]).logits


class ZooTest(parameterized.TestCase):
    @parameterized.parameters(*zoo.FAMILIES)
    def test_what_the_files_say(self, family):
        folder, words = animal(family)
        tokenizer, model = load_tokenizer(str(folder)), load_model(str(folder))
        self.assertLen(tokenizer, words)
        ids = find_sentinel_ids(tokenizer).tolist()
        self.assertEqual(ids[:3], zoo.sentinel_ids(family, words))
        is_gemma = family in zoo.GEMMA
        self.assertLen(ids, 99 if is_gemma else zoo.UMT5_SENTINELS if family == "umt5" else 100)
        step = 1 if is_gemma else -1
        self.assertEqual(ids, list(range(ids[0], ids[0] + step * len(ids), step)))
        config = model.config
        special = (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id)
        self.assertEqual(special, (0, 1, 2 if is_gemma else 0))
        self.assertEqual((tokenizer.pad_token_id, tokenizer.eos_token_id), (0, 1))
        self.assertEqual(is_tied(model), family in TIED)
        self.assertEqual(bool(getattr(config, "scale_decoder_outputs", False)), family == "t5_v1_0")
        self.assertEqual(model.get_input_embeddings().num_embeddings, words if is_gemma else -(-words // 128) * 128)
        encode = plain_encoder(tokenizer)
        for ids_of_text in encode(list(MADE_FOR_TEXT)):
            self.assertEmpty({0, 1, *ids[:4]} & {*ids_of_text}, "a text became a special token")

    @parameterized.parameters(*zoo.FAMILIES)
    def test_ids_are_those_of_the_tool_that_made_the_tokenizer(self, family):
        """sentencepiece for T5, mT5 and umT5, whose tokenizer.json lacks the bytes; `tokenizers`; ByT5's are bytes."""
        folder, words = animal(family)[0], zoo.lines()
        texts = [*words[:20], *ODD_TEXTS, words[0] + "\n" + words[1].upper()]
        if family == "byt5":
            wanted = [[byte + 3 for byte in text.encode()] for text in texts]
        elif (folder / "spiece.model").is_file():
            wanted = SentencePieceProcessor(model_file=str(folder / "spiece.model")).encode(texts)
        else:
            made = Tokenizer.from_file(str(folder / "tokenizer.json"))
            wanted = [made.encode(text, add_special_tokens=False).ids for text in texts]
        tokenizer = load_tokenizer(str(folder))
        self.assertEqual(tokenizer(texts, add_special_tokens=False)["input_ids"], wanted)
        self.assertEqual([list(ids) for ids in plain_encoder(tokenizer)(texts)], wanted)
        if family in ("mt5", "umt5", *zoo.GEMMA):  # with bytes: nothing is lost
            for text in ("Té 😀", "中", "😀"):
                ids = tokenizer(text)["input_ids"]
                self.assertNotIn(tokenizer.unk_token_id, ids)
                self.assertEqual(tokenizer.decode(ids, skip_special_tokens=True), text)

    @parameterized.parameters(*zoo.FAMILIES)
    def test_pre_training_resumes_bit_for_bit(self, family):
        folder, results = pre_trained(family)
        rows = load_model(str(animal(family)[0])).get_input_embeddings().num_embeddings
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        # Fresh weights know nothing: logits are about N(0, 1), and the loss ln(rows) + 1/2; T5Gemma's are near 0.
        nothing = torch.tensor(float(rows)).log().item() + (0 if family in zoo.GEMMA else 0.5)
        self.assertAlmostEqual(losses[0], nothing, delta=0.75)
        self.assertLess(results["eval_loss"], losses[0] + 1)
        self.assertIn("| text | masked | filled in |", (folder / "samples.md").read_text())

        again = place() / "resumed" / family
        shutil.copytree(folder / "checkpoint-2", again / "checkpoint-2")
        pre_train(animal(family)[0], again, "--resume_from_checkpoint")
        whole, resumed = (load_file(path / "model.safetensors") for path in (folder, again))
        before = load_model(str(animal(family)[0])).state_dict()
        self.assertEqual(whole.keys(), resumed.keys())
        for name, tensor in whole.items():
            self.assertTrue(torch.equal(tensor, resumed[name]), name)
        changed = {name.partition(".embed")[0] for name in whole if not torch.equal(whole[name], before[name])}
        self.assertContainsSubset(EMBEDDINGS.get(family, {"shared.weight"}), changed)
        self.assertEqual(any("lm_head" in name for name in whole), family not in TIED)

    @parameterized.parameters(*zoo.FAMILIES)
    def test_fine_tuned_evaluated_by_generating(self, family):
        flags = dict(benchmark="zoo", dataset_name="topic", data_dir=place(), max_eval_samples=4, report_to="none")
        flags |= dict(model_name_or_path=fine_tuned(family), per_device_eval_batch_size=3, disable_tqdm="true")
        found = []
        with mock.patch.dict(constants.DATASET_VALS, zoo={"topic": TASK}):
            for number, switches in enumerate([["--predict_with_generate"], []]):
                out = place() / "evaluated" / f"{family}_{number}"
                results, _ = script(evaluate_t5, *switches, **flags, output_dir=out)
                rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
                self.assertEqual([row["target"] for row in rows], ["bread", "moon", "bread", "moon"])
                found.append((results["eval_accuracy"], [row["prediction"] in LABELS for row in rows]))
        self.assertEqual(found[0], found[1], "teacher forcing gives what greedy decoding would")

    @parameterized.parameters(*zoo.FAMILIES)
    def test_exported_into_plain_transformers(self, family):
        ours = load_tokenizer(str(animal(family)[0]))
        tuned = [fine_tuned(family)] if family in ("t5_v1_0", "umt5") else []  # the two that scale, or should not
        for number, folder in enumerate([pre_trained(family)[0], *tuned]):
            out = place() / "exported" / f"{family}_{number}"
            found, _ = script(export_checkpoint, model_name_or_path=folder, output_dir=out, num_samples=3)
            self.assertEqual(found["huggingface"]["same_tokens"], 3)
            for saved in (folder, out):  # transformers 4.57 fails at a list of this name, and at that class
                content = json.loads((saved / "tokenizer_config.json").read_text())
                self.assertNotIsInstance(content.get("extra_special_tokens"), list)
                self.assertNotEqual(content["tokenizer_class"], "TokenizersBackend")
            # Under sdpa, its default, transformers 5.17 shows umT5's decoder later tokens.
            attention = "eager" if OLDER_TRANSFORMERS and family == "umt5" else None
            tokenizer = AutoTokenizer.from_pretrained(out)
            model = AutoModelForSeq2SeqLM.from_pretrained(out, attn_implementation=attention)
            self.assertEqual(tokenizer.get_vocab(), ours.get_vocab())
            texts = [*zoo.lines()[:3], "Bada <extra_id_0> dile."]
            ids = tokenizer(texts, return_tensors="pt", padding=True).input_ids
            self.assertEqual(ids.tolist(), ours(texts, return_tensors="pt", padding=True).input_ids.tolist())
            expected = logits_of(load_model(str(folder)), ids)
            scales_all = not hasattr(model.config, "scale_decoder_outputs")
            if family == "umt5" and scales_all:  # transformers 5.0 to 5.23 forget that its head is apart
                expected = expected * model.config.d_model**-0.5
            torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-5, atol=2e-6)
            card = (out / "README.md").read_text()
            code = card.split("```python\n")[1].split("```")[0].replace(f'"{out.name}"', f'"{out}"')
            self.assertIn(str(out), code)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, shown := {})  # noqa: S102 (the card's own example)
            if not number:
                given = shown["inputs"]["input_ids"][0].tolist()
                sentinels = zoo.sentinel_ids(family, animal(family)[1])
                self.assertEqual([n for n in given if n in sentinels], sentinels[:2])
            self.assertEqual("greedy answers are right" in card, family == "umt5")
            config = json.loads((out / "config.json").read_text())
            self.assertEqual(config["model_type"], zoo.CONFIGS[family]["model_type"])
            self.assertIs(config["tie_word_embeddings"], family in TIED)


class HalfTest(parameterized.TestCase):
    @parameterized.parameters(*zoo.FAMILIES)
    def test_a_bfloat16_file_answered_in_bfloat16_is_never_float32(self, family):
        """T5Gemma 2's is, since transformers gives its parts types of their own."""
        load_model(str(animal(family)[0])).to(torch.bfloat16).save_pretrained(self.folder)
        load = functools.partial(load_to_answer, str(self.folder), None, NO_FEATURES, torch.device("cpu"), True)
        model, by_float32 = load(to_bf16=True), load()
        self.assertEqual(by_float32.dtype, torch.float32)
        self.assertEqual(model.dtype, torch.float32 if family == "t5gemma2" else torch.bfloat16)
        for name, weight in by_float32.to(torch.bfloat16).state_dict().items():
            self.assertTrue(torch.equal(model.to(torch.bfloat16).state_dict()[name], weight), name)


class SentinelTest(parameterized.TestCase):
    def test_byt5_is_told_of_sentinels_that_texts_have_too(self):
        byt5, t5 = (load_tokenizer(str(animal(name)[0])) for name in ("byt5", "t5_v1_1"))
        said = SpanCorruption(byt5, 512).plan([])["sentinels"]
        self.assertRegex(said, "28 bytes from id 258 down; UTF-8 leaves 11 unused: .*--mean_noise_span_length 20")
        text = plain_encoder(byt5)(["".join(map(chr, [*range(32, 0xD800), 0x10FFFF]))])[0]
        self.assertLess(max(text), 258 - 10)  # the first eleven are in no text
        self.assertEmpty(SpanCorruption(byt5, 512, mean_noise_span_length=20).plan([]))
        self.assertEmpty(SpanCorruption(t5, 512).plan([]))
