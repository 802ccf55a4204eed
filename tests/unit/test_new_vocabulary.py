"""A checkpoint with another tokenizer: kept rows are the old ones exactly, new ones the mean, embedding and head."""

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from absl.testing import parameterized
from helpers import SMALL_RUN, argv_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import pre_train_t5
from data_collator_t5 import find_sentinel_ids, vocabulary_size
from features.ctranslate2.engine import names_of_rows
from foundry.arguments.model import ModelArguments
from foundry.common.errors import UserError
from foundry.corpora.own_ids import IdDocument, IdEncoder, ids_tokenizer
from foundry.corpora.tokenizers import load_tokenizer
from foundry.model_t5 import build_config, create_model, get_model, load_model
from foundry.modeling.new_vocabulary import change_vocabulary, matching_ids, same_vocabulary

SHAPE = dict(d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=1, num_decoder_layers=1)
SENTINELS = [f"<extra_id_{number}>" for number in range(20)]
# Flags of a pre-training of two steps.
SCRIPT = SMALL_RUN | dict(input_seq_length=16, max_steps=2, save_steps=1, eval_steps=2, max_eval_samples=8)


def tokenizer_of(
    words: list[str], special=("<pad>", "</s>", "<unk>"), far: dict[str, int] | None = None
) -> PreTrainedTokenizerFast:
    """One word, one id: special tokens, `words`, then the sentinels, of which the first has the last id. far: words
    behind ids that have none."""
    every = [*special, *words, *reversed(SENTINELS)]
    ids = {word: n for n, word in enumerate(every)} | (far or {})
    backend = Tokenizer(models.WordLevel(ids, unk_token=special[2]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=SENTINELS, **names)


OLD = tokenizer_of([f"w{n}" for n in range(40)])
NEW = tokenizer_of(["w7", "nuovo", *[f"w{n}" for n in range(20, 40)], *[f"n{n}" for n in range(60)]])


def model_of(tied: bool):
    torch.manual_seed(0)
    changes = dict(feed_forward_proj="relu", tie_word_embeddings=True) if tied else {}
    return create_model(build_config("tiny", len(OLD), SHAPE | changes)).eval()


class ChangeVocabularyTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_every_row(self, tied):
        model = model_of(tied)
        embedding, head = model.shared.weight.detach().clone(), model.lm_head.weight.detach().clone()
        words = change_vocabulary(model, OLD, NEW)
        kept = 3 + len(SENTINELS) + 21
        self.assertEqual(words, {"kept": kept, "new": len(NEW) - kept})
        self.assertEqual(model.config.vocab_size, 128)  # 105 words, in whole tiles
        before, after = OLD.get_vocab(), NEW.get_vocab()
        for old_weight, weight in ((embedding, model.shared.weight), (head, model.lm_head.weight)):
            self.assertEqual(weight.shape, (128, 16))
            mean = old_weight[: len(OLD)].double().mean(0).float()
            for word, number in after.items():
                wanted = old_weight[before[word]] if word in before else mean
                self.assertTrue(torch.equal(weight[number], wanted), word)
            self.assertTrue(torch.equal(weight[len(NEW) :], mean.expand(128 - len(NEW), 16)))
        self.assertEqual(model.lm_head.weight is model.shared.weight, tied)
        self.assertIs(model.encoder.embed_tokens.weight, model.shared.weight)
        self.assertIs(model.decoder.embed_tokens.weight, model.shared.weight)

    @parameterized.parameters(False, True)
    def test_it_reads_what_it_knew_as_before(self, tied):
        """A text of kept words has the same hidden states; logits of kept words are the old ones."""
        model = model_of(tied)
        text, answer = "w7 w25 <extra_id_0> w39", "<extra_id_0> w30"
        pairs = matching_ids(OLD, NEW)
        with torch.no_grad():
            old = model(**OLD(text, return_tensors="pt"), labels=OLD(answer, return_tensors="pt").input_ids).logits
            change_vocabulary(model, OLD, NEW)
            new = model(**NEW(text, return_tensors="pt"), labels=NEW(answer, return_tensors="pt").input_ids).logits
        torch.testing.assert_close(new[..., list(pairs)], old[..., list(pairs.values())])

    @parameterized.parameters(False, True)
    def test_survives_saving_and_training(self, tied):
        model = model_of(tied)
        change_vocabulary(model, OLD, NEW)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = load_model(folder)
            plain = AutoModelForSeq2SeqLM.from_pretrained(folder)
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(again.state_dict()[name], tensor), name)
            self.assertTrue(torch.equal(plain.state_dict()[name], tensor), name)
        labels = NEW("n3 nuovo", return_tensors="pt").input_ids
        again(**NEW("nuovo n5", return_tensors="pt"), labels=labels).loss.backward()
        self.assertGreater(again.lm_head.weight.grad.abs().sum().item(), 0)

    def test_special_tokens_are_matched_by_what_they_are_for(self):
        other = tokenizer_of(["w1"], special=("[PAD]", "[EOS]", "[UNK]"))
        pairs = matching_ids(OLD, other)
        self.assertEqual([pairs[number] for number in range(3)], [0, 1, 2])
        self.assertEqual(pairs[other.convert_tokens_to_ids("<extra_id_0>")], OLD.convert_tokens_to_ids("<extra_id_0>"))
        moved = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "P": 1, "E": 2, "U": 3}, unk_token="U")),
            pad_token="P",
            eos_token="E",
            unk_token="U",
        )
        model = model_of(False)
        change_vocabulary(model, OLD, moved)
        for config in (model.config, model.generation_config):
            self.assertEqual([config.pad_token_id, config.eos_token_id, config.decoder_start_token_id], [1, 2, 1])

    def test_sentinels_are_matched_by_number_whatever_their_names(self):
        """mT5's pieces begin with the mark of a space; ByT5's are its last bytes, not the words of that name."""
        words = ["<pad>", "</s>", "<unk>", "a", "é", "▁a", *[f"▁<extra_id_{n}>" for n in range(20)]]
        backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
        mt5 = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
        first = OLD.convert_tokens_to_ids("<extra_id_0>")
        special = {0: 0, 1: 1, 2: 2}
        self.assertEqual(matching_ids(OLD, mt5), special | {6 + n: first - n for n in range(20)})
        self.assertEqual(matching_ids(mt5, OLD), special | {first - n: 6 + n for n in range(20)})
        byt5 = ByT5Tokenizer()
        letter = {3 + ord("a"): 3}
        self.assertEqual(matching_ids(mt5, byt5), special | letter | {258 - n: 6 + n for n in range(20)})
        back = {3: 3 + ord("a")}  # the byte E9 is no é
        self.assertEqual(matching_ids(byt5, mt5), special | back | {6 + n: 258 - n for n in range(20)})

    def test_the_configuration_no_longer_names_sentinels_and_offset_of_the_old_one(self):
        ids = ids_tokenizer(10)
        for old, own in ((ByT5Tokenizer(), {}), (ids, dict(input_ids_offset=3))):
            named = dict(own, sentinel_ids=find_sentinel_ids(old).tolist())
            for new, kept in ((OLD, {}), (old, named)):
                model = create_model(build_config("tiny", len(old), SHAPE))
                model.config.update(named)
                change_vocabulary(model, old, new)
                found = model.config.to_dict()
                self.assertEqual({name: found[name] for name in named if name in found}, kept)

    def test_same_vocabulary(self):
        self.assertTrue(same_vocabulary(OLD, tokenizer_of([f"w{n}" for n in range(40)])))
        self.assertFalse(same_vocabulary(OLD, NEW))

    def test_a_tokenizer_that_never_was_the_models(self):
        model = create_model(build_config("tiny", 3, SHAPE))
        with self.assertRaisesRegex(ValueError, "own tokenizer has ids up to 1[0-9]+ and the model only 64 rows"):
            change_vocabulary(model, NEW, OLD)


class HolesTest(parameterized.TestCase):
    """A vocabulary has ids without tokens: an embedding needs rows up to the largest id."""

    def test_rows_and_tokens(self):
        far = tokenizer_of([f"w{n}" for n in range(40)], far={"far": 69_999})
        self.assertEqual(vocabulary_size(far), 70_000)
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        far.save_pretrained(folder / "far")
        loaded = load_tokenizer(str(folder / "far"))
        self.assertEqual(IdEncoder(loaded)(IdDocument(np.array([3, 69_999]), "x")).tolist(), [3, 69_999])
        with self.assertRaisesRegex(ValueError, "the id 500 must be an id of the tokenizer's 64, "):
            IdEncoder(loaded)(IdDocument(np.array([500]), "x"))
        self.assertEqual([names_of_rows(far, 70_016)[n] for n in (3, 500, 69_999)], ["w0", "<unused_500>", "far"])
        torch.manual_seed(0)
        model = create_model(build_config("tiny", vocabulary_size(far), SHAPE))
        self.assertEqual(model.config.vocab_size, 70_016)
        old = model.shared.weight.detach().clone()
        change_vocabulary(model, far, tokenizer_of(["far", "new"]))
        self.assertEqual(model.config.vocab_size, 64)
        torch.testing.assert_close(model.shared.weight[3], old[69_999], rtol=0, atol=0)
        of_tokens = old[sorted(far.get_vocab().values())]
        torch.testing.assert_close(model.shared.weight[4], of_tokens.double().mean(0).float())

    def test_added_tokens_with_ids_of_others_are_refused(self):
        """The `tokenizers` library numbers them by the count of tokens."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        backend = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 4}, unk_token="<unk>"))
        names = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<b>"], **names)
        tokenizer.save_pretrained(folder)
        with self.assertRaisesRegex(UserError, "its tokens '<b>' and 'a' have the same id, 4: "):
            load_tokenizer(str(folder))

    def test_a_run(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        tokenizer_of([f"w{n}" for n in range(40)], far={"far": 69_999}).save_pretrained(folder / "far")
        lines = [" ".join(["far", *(f"w{n * m % 40}" for m in range(1, 15))]) for n in range(200)]
        (folder / "text.txt").write_text("\n".join(lines) + "\n")
        flags = dict(SCRIPT, train_file=folder / "text.txt", tokenizer_name=folder / "far", config_name="tiny")
        shape = ",".join(f"{name}={value}" for name, value in SHAPE.items())
        flags |= dict(config_overrides=shape, output_dir=folder / "out", data_cache_dir=folder / "cache")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            results = pre_train_t5.main(argv_of(flags))
        self.assertGreater(results["eval_loss"], 0)
        self.assertNotRegex(printed.getvalue(), "tokens are <unk>")
        self.assertEqual(load_model(str(folder / "out")).config.vocab_size, 70_016)
        (tokens,) = (folder / "cache").rglob("train.bin")
        self.assertIn(69_999, np.fromfile(tokens, dtype=np.uint32))


class ScriptTest(parameterized.TestCase):
    def test_pre_training_goes_on_in_the_new_words_and_resumes(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        model_of(False).save_pretrained(folder / "old")
        OLD.save_pretrained(folder / "old")
        NEW.save_pretrained(folder / "new")
        text = [" ".join(f"w{20 + (n * m) % 20} n{(n + m) % 60}" for m in range(12)) for n in range(200)]
        (folder / "text.txt").write_text("\n".join(text) + "\n")
        files = dict(model_name_or_path="old", tokenizer_name="new", train_file="text.txt", output_dir="out")
        files |= dict(data_cache_dir="cache")
        argv = argv_of(SCRIPT | {name: folder / file for name, file in files.items()})
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            pre_train_t5.main(argv)
        self.assertRegex(
            printed.getvalue(), r"vocabulary +44 tokens keep their embeddings, 61 new ones start at their mean"
        )
        self.assertEqual(load_model(str(folder / "out")).config.vocab_size, 128)
        self.assertTrue(same_vocabulary(AutoTokenizer.from_pretrained(folder / "out"), NEW))
        (folder / "bare").mkdir()
        model_of(False).save_pretrained(folder / "bare")
        args = ModelArguments(model_name_or_path=str(folder / "bare"), tokenizer_name=str(folder / "old"))
        model, said = get_model(args, OLD, default_dropout=0.0)
        self.assertIn("it gets that of --tokenizer_name", said)
        self.assertEqual(model.config.vocab_size, 64)
        argv[argv.index("--max_steps") + 1] = "3"
        with contextlib.redirect_stdout(io.StringIO()):
            results = pre_train_t5.main([*argv, "--resume_from_checkpoint"])
        self.assertGreater(results["eval_loss"], 0)
