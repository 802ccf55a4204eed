"""A zoo of the T5 family: a tiny checkpoint of each family, with the files, fields and names of the published ones.

    folder = write_checkpoint(Path("zoo/mt5"), "mt5")     # config.json, weights, tokenizer files

config.json has every field of the published model's (google-t5/t5-small, google/t5-v1_1-small, google/flan-t5-small,
google/mt5-small, google/umt5-small, google/byt5-small, google/long-t5-local-base, google/long-t5-tglobal-base,
google/t5gemma-2b-2b-ul2, google/t5gemma-2-270m-270m) with our sizes; the tokenizer has its files, special tokens and
their places, with a vocabulary trained on the text here. The published vocabularies and ours have in common, from the
beginning and from the end:

    T5, LongT5   <pad> </s> <unk> words ...; <extra_id_99> ... <extra_id_0> added; rows up to the next 128
    mT5          <pad> </s> <unk> 256 bytes, words ..., and as its last pieces ▁<extra_id_99> ... ▁<extra_id_0>
    umT5         <pad> </s> <s> <unk> 256 bytes, words ...; <extra_id_299> ... <extra_id_0> added
    ByT5         <pad> </s> <unk> 256 bytes; <extra_id_0> ... <extra_id_124> added, which were never trained
    T5Gemma, 2   <pad> <eos> <bos> <unk> <mask> <2mass> [@BOS@] <unused0> ... <unused98> <start_of_turn> <end_of_turn>
                 256 bytes, words ...; as many rows as words
"""

import functools
import io
import json
import random
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from foundry.model_t5 import create_model

SIZES = dict(d_model=16, d_kv=4, d_ff=24, num_heads=4, num_layers=2)
_SUMMARIZATION = dict(
    early_stopping=True,
    length_penalty=2.0,
    max_length=200,
    min_length=30,
    no_repeat_ngram_size=3,
    num_beams=4,
    prefix="summarize: ",
)
_GERMAN = dict(early_stopping=True, max_length=300, num_beams=4, prefix="translate English to German: ")
_EVERY = dict(
    decoder_start_token_id=0,
    dropout_rate=0.1,
    eos_token_id=1,
    initializer_factor=1.0,
    is_encoder_decoder=True,
    layer_norm_epsilon=1e-06,
    pad_token_id=0,
    relative_attention_num_buckets=32,
)
_V1_0 = _EVERY | dict(
    architectures=["T5ForConditionalGeneration"],
    model_type="t5",
    n_positions=512,
    output_past=True,
    task_specific_params={"summarization": _SUMMARIZATION, "translation_en_to_de": _GERMAN},
)
_V1_1 = _EVERY | dict(
    architectures=["T5ForConditionalGeneration"],
    model_type="t5",
    feed_forward_proj="gated-gelu",
    num_decoder_layers=1,
    output_past=True,
    tie_word_embeddings=False,
)
_LONG = _V1_1 | dict(
    architectures=["LongT5ForConditionalGeneration"],
    model_type="longt5",
    n_positions=4096,
    use_cache=True,
    local_radius=7,
    global_block_size=4,
    relative_attention_max_distance=128,
    torch_dtype="float32",
    transformers_version="4.20.0.dev0",
)
CONFIGS = {
    "t5_v1_0": _V1_0,
    "t5_v1_1": _V1_1,
    "flan_t5": _V1_1 | _V1_0 | dict(transformers_version="4.23.1", use_cache=True),
    "mt5": _V1_1
    | dict(
        architectures=["MT5ForConditionalGeneration"],
        model_type="mt5",
        tokenizer_class="T5Tokenizer",
        transformers_version="4.10.0.dev0",
        use_cache=True,
    ),
    "umt5": _V1_1
    | dict(
        architectures=["UMT5ForConditionalGeneration"],
        model_type="umt5",
        tokenizer_class="T5Tokenizer",
        classifier_dropout=0.0,
        dense_act_fn="gelu_new",
        is_gated_act=True,
        relative_attention_max_distance=128,
        scalable_attention=True,
        torch_dtype="float32",
        transformers_version="4.31.0.dev0",
        use_cache=True,
    ),
    "byt5": _V1_1
    | dict(
        tokenizer_class="ByT5Tokenizer",
        gradient_checkpointing=False,
        transformers_version="4.7.0.dev0",
        use_cache=True,
    ),
    "longt5_local": _LONG | dict(encoder_attention_type="local"),
    "longt5_tglobal": _LONG | dict(encoder_attention_type="transient-global"),
}
_GEMMA = dict(
    attention_bias=False,
    attention_dropout=0.0,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=16,
    head_dim=4,
    initializer_range=0.02,
    intermediate_size=24,
    max_position_embeddings=8192,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    query_pre_attn_scalar=4,
    rms_norm_eps=1e-06,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
    torch_dtype="bfloat16",
    use_cache=True,
    dropout_rate=0.0,
)
_GEMMA_2 = _GEMMA | dict(
    model_type="t5_gemma_module", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=10000.0
)
_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA_3 = _GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=None, rope_parameters=_ROPE)
_PICTURES = dict(
    model_type="siglip_vision_model",
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)
_OF_BOTH = dict(
    dropout_rate=0.0,
    classifier_dropout_rate=0.0,
    initializer_range=0.02,
    is_encoder_decoder=True,
    eos_token_id=1,
    pad_token_id=0,
    transformers_version="4.53.0.dev0",
)
CONFIGS |= {
    "t5gemma": _OF_BOTH
    | dict(
        architectures=["T5GemmaForConditionalGeneration"],
        model_type="t5gemma",
        encoder=_GEMMA_2 | {"is_decoder": False},
        decoder=_GEMMA_2 | {"is_decoder": True, "cross_attention_hidden_size": 16},
    ),
    "t5gemma2": _OF_BOTH
    | dict(
        architectures=["T5Gemma2ForConditionalGeneration"],
        model_type="t5gemma2",
        image_token_index=6,
        encoder=dict(
            model_type="t5gemma2_encoder",
            text_config=_GEMMA_3 | {"model_type": "t5gemma2_text"},
            boi_token_index=5,
            vision_config=_PICTURES,
            mm_tokens_per_image=4,
            eoi_token_index=6,
            image_token_index=6,
        ),
        decoder=_GEMMA_3 | {"model_type": "t5gemma2_decoder"},
    ),
}
GEMMA = ("t5gemma", "t5gemma2")
FAMILIES = tuple(CONFIGS)
BIN = ("t5_v1_1", "mt5", "longt5_tglobal")  # written as pytorch_model.bin, with every name of the shared embedding
SPECIAL = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
UMT5_SENTINELS = 300
WORDS = 120  # pieces trained here, besides special ones, bytes and sentinels


@functools.cache
def lines() -> tuple[str, ...]:
    """Sentences of made-up words, the text of all zoo checkpoints."""
    chooser = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    words = ["".join(chooser.choices(syllables, k=chooser.randint(1, 3))) for _ in range(60)]
    return tuple(" ".join(chooser.choices(words, k=12)).capitalize() + "." for _ in range(300))


def sentinel_ids(family: str, rows: int) -> list[int]:
    """The first three sentinels of a zoo checkpoint whose vocabulary, without rows for rounding, has `rows` tokens."""
    if family in GEMMA:
        return [7, 8, 9]
    last = 258 if family == "byt5" else rows - 1
    return [last, last - 1, last - 2]


# ---------------------------------------------------------------- tokenizers
@functools.cache
def _pieces(special: tuple[str, ...], byte_fallback: bool) -> sentencepiece_model_pb2.ModelProto:
    """A SentencePiece unigram model; special: its first pieces, <pad> and </s> being ids 0 and 1."""
    written = io.BytesIO()
    ids = {
        name: special.index(piece) if piece in special else -1
        for name, piece in (("unk_id", "<unk>"), ("bos_id", "<s>"))
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()),
        model_writer=written,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        vocab_size=len(special) + 256 * byte_fallback + WORDS,
        byte_fallback=byte_fallback,
        num_threads=1,
        required_chars="[]NLUGS2",  # of UL2's modes
        minloglevel=2,
        **ids,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(written.getvalue())
    return proto


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _write_t5_tokenizer(folder: Path) -> int:
    """spiece.model without sentinels; tokenizer_config.json adds 100 words. All write the files, and return the size
    of the vocabulary."""
    proto = _pieces(("<pad>", "</s>", "<unk>"), False)
    (folder / "spiece.model").write_bytes(proto.SerializeToString())
    names = {"additional_special_tokens": [f"<extra_id_{n}>" for n in range(100)]}
    _write_json(folder / "special_tokens_map.json", SPECIAL | names)
    named = {"tokenizer_class": "T5Tokenizer"} if folder.name.startswith("longt5") else {}
    _write_json(folder / "tokenizer_config.json", SPECIAL | {"extra_ids": 100} | names | named)
    return len(proto.pieces) + 100


def _write_mt5_tokenizer(folder: Path) -> int:
    """The sentinels are the last pieces of spiece.model, and tokenizer_config.json adds none."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.CopyFrom(_pieces(("<pad>", "</s>", "<unk>"), True))
    for number in reversed(range(100)):
        proto.pieces.add(piece=f"▁<extra_id_{number}>", score=0.0)
    (folder / "spiece.model").write_bytes(proto.SerializeToString())
    _write_json(folder / "special_tokens_map.json", SPECIAL)
    more = {
        "extra_ids": 0,
        "additional_special_tokens": None,
        "sp_model_kwargs": {},
        "tokenizer_class": "T5Tokenizer",
        "name_or_path": "google/mt5-small",
        "tokenizer_file": None,
    }
    _write_json(folder / "tokenizer_config.json", SPECIAL | more)
    return len(proto.pieces)


def _write_umt5_tokenizer(folder: Path) -> int:
    """<s> before <unk>, 300 sentinels after the pieces, and a tokenizer.json."""
    proto = _pieces(("<pad>", "</s>", "<s>", "<unk>"), True)
    (folder / "spiece.model").write_bytes(proto.SerializeToString())
    backend = Tokenizer(models.Unigram([(piece.piece, piece.score) for piece in proto.pieces], unk_id=3))
    space = dict(replacement="▁", prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**space)]
    )
    charsmap = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    backend.normalizer = normalizers.Sequence([charsmap, normalizers.Replace(Regex(" {2,}"), " ")])
    backend.decoder = decoders.Metaspace(**space)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    sentinels = [f"<extra_id_{number}>" for number in range(UMT5_SENTINELS)]
    backend.add_special_tokens(["<pad>", "</s>", "<s>", "<unk>", *reversed(sentinels)])
    backend.save(str(folder / "tokenizer.json"))
    names = SPECIAL | {"bos_token": "<s>", "additional_special_tokens": sentinels}
    _write_json(folder / "special_tokens_map.json", names)
    more = {"extra_ids": UMT5_SENTINELS, "sp_model_kwargs": {}, "tokenizer_class": "T5Tokenizer"}
    _write_json(folder / "tokenizer_config.json", names | more)
    return backend.get_vocab_size()


def _write_byt5_tokenizer(folder: Path) -> int:
    """No vocabulary: it is part of the class that config.json names."""
    flags = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    special = {name: flags | {"content": word} for name, word in SPECIAL.items()}
    names = {"additional_special_tokens": [f"<extra_id_{n}>" for n in range(125)]}
    _write_json(folder / "special_tokens_map.json", special | names)
    _write_json(folder / "tokenizer_config.json", special | {"extra_ids": 125} | names)
    return 3 + 256 + 125


def _write_gemma_tokenizer(folder: Path) -> int:
    """A BPE that begins texts with <bos> and does not end them; its unused tokens are added ones, but not special."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<2mass>", "[@BOS@]", "<start_of_turn>", "<end_of_turn>"]
    unused = [f"<unused{number}>" for number in range(99)]
    first = [*special[:7], *unused, *special[7:]]
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # splits into words, for the training only
    known = [*first, *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=len(known) + WORDS, special_tokens=known, show_progress=False)
    backend.train_from_iterator(lines(), trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        token | {"special": token["content"] in special}
        for token in content["added_tokens"]
        if token["content"] in first
    ]
    backend = Tokenizer.from_str(json.dumps(content))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    backend.save(str(folder / "tokenizer.json"))
    names = dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    _write_json(folder / "special_tokens_map.json", names)
    more = dict(
        add_bos_token=True,
        add_eos_token=False,
        clean_up_tokenization_spaces=False,
        sp_model_kwargs={},
        tokenizer_class="GemmaTokenizer",
        use_default_system_prompt=False,
    )
    _write_json(folder / "tokenizer_config.json", names | more)
    return backend.get_vocab_size()


TOKENIZERS = {"mt5": _write_mt5_tokenizer, "umt5": _write_umt5_tokenizer, "byt5": _write_byt5_tokenizer}
TOKENIZERS |= dict.fromkeys(GEMMA, _write_gemma_tokenizer)


# ---------------------------------------------------------------- checkpoints
def config_of(family: str, words: int) -> dict:
    """The contents of config.json for a vocabulary of this many tokens."""
    if family in GEMMA:
        return _with_words(CONFIGS[family], words)
    return CONFIGS[family] | SIZES | {"vocab_size": -(-words // 128) * 128}


def _with_words(config: dict, words: int) -> dict:
    """The configuration with this many rows, in every part that has the number."""
    parts = {name: _with_words(part, words) for name, part in config.items() if isinstance(part, dict)}
    return config | parts | ({"vocab_size": words} if "hidden_activation" in config or "decoder" in config else {})


def write_tied(folder: Path, family: str) -> None:
    """Writes a checkpoint of the family as transformers makes one: its head is the embedding. Its weights are large."""
    write_checkpoint(folder, family)
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def write_checkpoint(folder: Path, family: str) -> int:
    """Writes a checkpoint of the family into the new `folder`; returns the number of tokens in its vocabulary.

    The weights are fresh ones, with a first loss near ln(vocabulary). A .bin has all four names of embedding and head,
    as converted from Google's; a .safetensors each tensor once, as the Hub makes it of a .bin.
    """
    folder.mkdir(parents=True)
    words = TOKENIZERS.get(family, _write_t5_tokenizer)(folder)
    config = config_of(family, words)
    _write_json(folder / "config.json", dict(sorted(config.items())))
    torch.manual_seed(FAMILIES.index(family))
    model = create_model(AutoConfig.from_pretrained(folder))
    state = dict(model.state_dict())
    if config["model_type"] == "t5":  # left over in Google's files; no model reads it
        state["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    if family in BIN:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        once = {name: tensor.contiguous() for name, tensor in state.items() if name not in model.all_tied_weights_keys}
        save_file(once, folder / "model.safetensors", {"format": "pt"})
    return words
