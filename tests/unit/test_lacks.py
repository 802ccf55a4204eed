"""What pinned libraries lack, so that a refusal of ours never outlives its reason.

A row says what a library lacks, where we refuse or work around it, and how that is tried. Whoever upgrades a library
that has gained it sees its row fail, and lifts the refusal. What cannot be tried in seconds on a CPU has its version
and date in docs/help.md; what CTranslate2 lacks within a model is in test_ctranslate2_gemma.py.
"""

import functools
import importlib.metadata
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import torch
import zoo
from absl.testing import parameterized
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import normalizers
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LongT5Config,
    LongT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

ROOT = Path(__file__).resolve().parents[2]
SHAPE = dict(vocab_size=50, d_model=8, d_kv=2, d_ff=8, num_heads=4, num_layers=1, decoder_start_token_id=0)


class Lack(NamedTuple):
    """package: as it is installed. what: "package has no ...". place, words: the file that refuses or works around it,
    and words of that. error: what `tried(folder)` raises today, and words of it."""

    package: str
    what: str
    place: str
    words: str
    error: tuple[type[Exception], str]
    tried: Callable[[Path], object]


def t5(**changes) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**SHAPE | changes)).eval()


def generate(_: Path, **settings) -> object:
    return t5().generate(input_ids=torch.tensor([[4, 5, 6]]), max_new_tokens=3, **settings)


def generate_deep(_: Path) -> object:
    return t5(num_decoder_layers=3).generate(input_ids=torch.tensor([[4, 5, 6]]), max_new_tokens=3)


def attend(_: Path, family: str, attention: str) -> object:
    config = AutoConfig.for_model(**zoo.config_of(family, 300))
    return AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)


def flex_bias(_: Path) -> object:
    model = T5ForConditionalGeneration._from_config(T5Config(**SHAPE), attn_implementation="flex_attention").eval()
    ids = torch.full((2, 9), 7)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        return model.requires_grad_(False)(input_ids=ids, labels=ids)


def long_encoder(kind: str) -> LongT5ForConditionalGeneration:
    return LongT5ForConditionalGeneration(LongT5Config(**SHAPE, local_radius=3, encoder_attention_type=kind))


def long_mask(_: Path) -> object:
    return long_encoder("local").get_encoder()(input_ids=torch.full((2, 9), 7), attention_mask=torch.ones(2, 9, 9))


def long_compiled(_: Path) -> object:
    ids = torch.full((2, 9), 7)
    return torch.compile(long_encoder("transient-global"), backend="aot_eager")(input_ids=ids, labels=ids)


def data_script(folder: Path) -> object:
    from datasets import load_dataset

    (folder / "mine").mkdir()
    (folder / "mine" / "mine.py").write_text("import datasets\n")
    return load_dataset(str(folder / "mine"))


def gguf_architecture(_: Path) -> object:
    import gguf

    return next(one for one in gguf.MODEL_ARCH if "T5" in one.name and one.name not in ("T5", "T5ENCODER"))


def gguf_key(_: Path, word: str) -> object:
    import gguf

    keys = [*vars(gguf.Keys.Attention).values(), *vars(gguf.Keys.LLM).values()]
    return next(key for key in keys if word in str(key))


def converted(folder: Path, family: str) -> object:
    from ctranslate2.converters import TransformersConverter

    zoo.write_checkpoint(folder / family, family)
    return TransformersConverter(str(folder / family)).convert(str(folder / "converted"))


def translated(folder: Path, setting: str) -> object:
    import ctranslate2

    converted(folder, "t5_v1_1")
    return ctranslate2.Translator(str(folder / "converted")).translate_batch([["a"]], **{setting: 1})


def embedded(folder: Path) -> object:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Transformer

    zoo.write_checkpoint(folder / "t5gemma2", "t5gemma2")
    AutoModelForSeq2SeqLM.from_pretrained(folder / "t5gemma2").get_encoder().save_pretrained(folder / "encoder")
    AutoTokenizer.from_pretrained(folder / "t5gemma2").save_pretrained(folder / "encoder")
    return SentenceTransformer(modules=[Transformer(str(folder / "encoder"))], device="cpu").encode("bada")


def marked_letter(_: Path) -> None:
    """SentencePiece's own map has of these two the á, or else both."""
    model = io.BytesIO()
    text = dict(sentence_iterator=iter(["the old fox"] * 9), vocab_size=30, hard_vocab_limit=False)
    sentencepiece.SentencePieceTrainer.train(**text, model_writer=model, minloglevel=2)
    charsmap = ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap
    found = normalizers.Precompiled(charsmap).normalize_str("\uff41\u0301")
    if found == "a":
        raise ValueError("the mark is lost")


def row(*values: object, tried: Callable, **more: object) -> Lack:
    return Lack(*values, functools.partial(tried, **more))


FAMILIES, GEMMA = "foundry/modeling/families.py", "features/gemma/t5gemma.py"
GGUF, CTRANSLATE2 = "features/gguf/writing.py", "features/ctranslate2/engine.py"
SETTINGS, ENCODER = "foundry/modeling/generation_settings.py", "features/encoder/encoder.py"
CODE = (ValueError, "trust_remote_code")
# fmt: off
LACKS = [
    row("transformers", "a cache for a decoder deeper than its encoder", FAMILIES, "_generate_with_growing_cache",
        (IndexError, "out of range"), tried=generate_deep),
    row("transformers", "flex_attention with T5's bias for several rows", "docs/help.md", "| `flex_attention` |",
        (IndexError, "out of bounds"), tried=flex_bias),
    row("transformers", "sdpa for LongT5", FAMILIES, "LongT5's encoder has attention of its own",
        (ValueError, "scaled_dot_product_attention"), tried=attend, family="longt5_local", attention="sdpa"),
    row("transformers", "a mask that keeps LongT5's examples apart", FAMILIES, "LongT5's encoder takes no mask",
        (RuntimeError, "must match"), tried=long_mask),
    row("transformers", "a LongT5 that can be compiled", FAMILIES, "not for longt5 models: compiled",
        (RuntimeError, "fake tensor"), tried=long_compiled),
    row("transformers", "sdpa for T5Gemma", GEMMA, "which only eager does",
        (ValueError, "scaled_dot_product_attention"), tried=attend, family="t5gemma", attention="sdpa"),
    row("transformers", "groups of beams", SETTINGS, "num_beam_groups", CODE, tried=generate,
        num_beams=4, num_beam_groups=2, diversity_penalty=1.0),
    row("transformers", "contrastive search", SETTINGS, "penalty_alpha", CODE, tried=generate,
        penalty_alpha=0.6, top_k=4),
    row("transformers", "words that an answer must have", SETTINGS, "force_words_ids", CODE, tried=generate,
        num_beams=4, force_words_ids=[[7]]),
    row("transformers", "DoLa", SETTINGS, "dola_layers", CODE, tried=generate, dola_layers="low"),
    row("datasets", "data sets with a script", "foundry/corpora/hub.py", "has a script, which is not run",
        (RuntimeError, "scripts are no longer supported"), tried=data_script),
    row("tokenizers", "SentencePiece's map for letters with marks", "foundry/corpora/sentencepiece_models.py",
        "Lost are marks behind what NFC does not join", (ValueError, "the mark is lost"), tried=marked_letter),
    row("gguf", "LongT5, T5Gemma or T5Gemma 2", GGUF, "the family", (StopIteration, ""), tried=gguf_architecture),
    row("gguf", "a key for T5's largest distance", GGUF, "relative_attention_max_distance",
        (StopIteration, ""), tried=gguf_key, word="distance"),
    row("gguf", "a key for T5's activation", GGUF, "feed_forward_proj",
        (StopIteration, ""), tried=gguf_key, word="activation_function"),
    row("ctranslate2", "LongT5", CTRANSLATE2, "which CTranslate2 lacks",
        (ValueError, "No conversion is registered"), tried=converted, family="longt5_local"),
    *(row("ctranslate2", setting, CTRANSLATE2, "has nothing like",
          (TypeError, "incompatible function arguments"), tried=translated, setting=setting)
      for setting in ("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias",
                      "encoder_no_repeat_ngram_size", "encoder_repetition_penalty")),
    row("sentence-transformers", "T5Gemma 2 without its image processor", ENCODER, "sentence-transformers loads them",
        (OSError, "image processor"), tried=embedded),
]
# fmt: on


class LacksTest(parameterized.TestCase):
    @parameterized.named_parameters((f"{lack.package}_{lack.what}".replace(" ", "_"), lack) for lack in LACKS)
    def test_a_library_still_lacks_what_is_refused(self, lack):
        place = ROOT / lack.place
        if not place.is_file() or importlib.util.find_spec(lack.package.replace("-", "_")) is None:
            self.skipTest(f"no {lack.place}, or no {lack.package}")
        self.assertIn(lack.words, place.read_text(encoding="utf-8"), "refused no longer: delete this row")
        try:
            lack.tried(self.folder)
        except lack.error[0] as error:
            self.assertIn(lack.error[1], str(error))
        else:
            version = importlib.metadata.version(lack.package)
            self.fail(f"{lack.package} {version} now has {lack.what}: {lack.place} need not refuse it any more")
