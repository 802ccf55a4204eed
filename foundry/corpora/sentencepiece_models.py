"""SentencePiece models as files of the `tokenizers` library: the same ids for every text, or refused by name.

    model = SentencePieceModel(path.read_bytes())
    content = model.tokenizer_content("--tokenizer_name own.model")     # of a tokenizer.json
    texts = model.probe_texts()
    check_same_ids(texts, ids_of(content, texts), model.encode(texts), "--tokenizer_name own.model")

transformers' own conversion takes the pieces and the map of letters, and ignores the other settings of a model.
"""

import base64
import unicodedata
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from tokenizers import normalizers

from data_collator_t5 import SENTINEL_NAME
from foundry.common.errors import UserError

_BUILTIN_RULES = ("", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity")
MOST_SYMBOLS = 5_000  # each is a rule of its own; Gemma has some hundreds
LONGEST_PIECE = 1_000  # letters; SentencePiece learns at most 16 unless it is told otherwise
_PRIVATE_USE = 0xE000  # first of the letters that stand for symbols which normalization would change

# Decoding: bytes become letters again, and the space before the first word goes.
READS_BYTES = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
# The text "<0x0A>" is six letters, not the name of a byte: cut into "<" and "0x0A>" it is never looked up as a whole.
CUTS_BYTE_NAMES = {
    "type": "Split",
    "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
# Line breaks, spaces, digits, other scripts, letters in parts, signs and emoji.
ODD_TEXTS = """the old dogs|Ein 日本 fox!| two  spaces|red\nold \n foxes|\n\nlines\n|trailing  |a\tb\t|x  y   z|A\r\nB
|12,345.67 890|3 000 000|ABC abc AbC|don't|"quoted" (text)|[x]{y}<z>|#@$%^&*+=~|...!!??|--- ___|http://a.b/c?d=e&f
|Té 😀 中文|😀😀|👩‍🚀🇮🇹❤️|İstanbul straße ß|ﬁne ½ Ⅷ|ＡＢＣ，１２|a\u00a0b\u2009c\u3000d|e\u0301 e\u0302\u0301 o\u0308
|привет мир|नमस्ते दुनिया|สวัสดี กำ|안녕하세요|\u1112\u1161\u11ab|مرحبا بالعالم|שלום|γειά σου|ひらがなカタカナ|漢字かな
|\u200bzero\u200d\ufeff|<0x0A><0x41>x|∑∫√≤|№ ™ ©|α1β2|a1b2c3|  lead\n\ttab||a| a|a |.|1|中|\u00e9|\U0001f980""".split(
    "|"
)


class SentencePieceModel:
    """A SentencePiece model: its pieces and settings, and what `tokenizers` needs to give its ids."""

    def __init__(self, model: bytes):
        """RuntimeError for bytes that are no model."""
        from sentencepiece import SentencePieceProcessor  # which a GPU machine may lack
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        self.processor = SentencePieceProcessor(model_proto=model)
        self.proto = ModelProto.FromString(model)

    def _pieces(self, *kinds: str) -> dict[str, float]:
        """{piece: score} of the pieces of these kinds."""
        wanted = {self.proto.SentencePiece.Type.Value(kind) for kind in kinds}
        return {piece.piece: piece.score for piece in self.proto.pieces if piece.type in wanted}

    def special_pieces(self) -> dict[str, str]:
        """{"pad_token": "<pad>", ...}: the pieces at the ids that the model names, whatever their text."""
        named = {}
        for role in ("pad", "eos", "unk", "bos"):
            number = getattr(self.proto.trainer_spec, f"{role}_id")
            if 0 <= number < len(self.proto.pieces):
                named[f"{role}_token"] = self.proto.pieces[number].piece
        return named

    def tokenizer_content(self, shown: str) -> dict:
        """The content of a tokenizer.json that gives the model's ids.

        UserError, which begins with `shown` and names the setting, for a kind that `tokenizers` cannot imitate.
        """
        self._refuse_settings(shown)
        special, added = self._pieces("CONTROL", "UNKNOWN"), []
        for number, piece in enumerate(self.proto.pieces):
            if piece.piece in special:
                added.append(special_token(number, piece.piece))
        one_word = not any("▁" in piece[1:] for piece in self._pieces("NORMAL", "USER_DEFINED"))
        back = [_replace(mark, symbol) for symbol, mark in self._stand_ins.items()]
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": self._normalizers()},
            "pre_tokenizer": space_marks("never") | {"split": one_word},
            "post_processor": None,
            "decoder": READS_BYTES | {"decoders": [*back, *READS_BYTES["decoders"]]},
            "model": self._vocabulary(),
        }
        return with_bytes(content) if self.proto.trainer_spec.byte_fallback else content

    def _refuse_settings(self, shown: str) -> None:
        trainer = self.proto.trainer_spec
        longest = max(map(len, self._pieces("NORMAL")), default=0)
        refused = {
            "model_type=word": trainer.model_type == trainer.WORD,
            "treat_whitespace_as_suffix=true": trainer.treat_whitespace_as_suffix,
            "escape_whitespaces=false": not self.proto.normalizer_spec.escape_whitespaces,
            "a denormalization rule": bool(self.proto.denormalizer_spec.precompiled_charsmap),
            "pieces that are not to be used": bool(self._pieces("UNUSED")),
            f"more than {MOST_SYMBOLS:,} symbols": len(self._pieces("USER_DEFINED", "CONTROL")) > MOST_SYMBOLS,
            f"pieces of more than {LONGEST_PIECE} letters": longest > LONGEST_PIECE,
        }
        if settings := ", ".join(setting for setting, has_it in refused.items() if has_it):
            raise UserError(
                f"{shown}: a SentencePiece model with {settings}, which is not supported: train one without"
            )

    def _vocabulary(self) -> dict:
        """The model of the tokenizer.json: pieces with scores, or pieces and the order in which they are joined."""
        names = [self._name(piece.piece) for piece in self.proto.pieces]
        unknown = next(iter(self._pieces("UNKNOWN")))
        trainer = self.proto.trainer_spec
        if trainer.model_type == trainer.UNIGRAM:
            # sentencepiece always takes a symbol, and so does a search for the best sum where its score is the highest.
            symbols, scored = self._pieces("USER_DEFINED"), []
            for name, piece in zip(names, self.proto.pieces, strict=True):
                scored.append([name, 0.0 if piece.piece in symbols else piece.score])
            return {"type": "Unigram", "unk_id": self.processor.unk_id(), "vocab": scored, "byte_fallback": False}
        usable, merges = self._pieces("NORMAL"), []
        if trainer.model_type == trainer.BPE:
            for piece in sorted(usable, key=usable.get, reverse=True):
                for cut in range(1, len(piece)):
                    if piece[:cut] in usable and piece[cut:] in usable:
                        merges.append([piece[:cut], piece[cut:]])
        vocabulary = {name: number for number, name in enumerate(names)}
        return {"type": "BPE", "vocab": vocabulary, "merges": merges, "unk_token": unknown, "fuse_unk": True}

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        """{symbol: letters for private use that stand for it}, the longest symbols first.

        sentencepiece looks for a model's own symbols, such as a line break, before it normalizes or joins letters. So
        symbols that normalization would change first become letters that no rule changes, one for each of theirs. Where
        pieces are made by joining, every symbol becomes a single letter. A symbol of several words, New▁York, is also
        found in the normalized text, where ▁ is a space.
        """
        charsmap = self.proto.normalizer_spec.precompiled_charsmap
        normalize = normalizers.Precompiled(charsmap).normalize_str if charsmap else str
        symbols = sorted({symbol.strip("▁") for symbol in self._pieces("USER_DEFINED")}, key=len, reverse=True)
        if self.proto.trainer_spec.model_type != self.proto.trainer_spec.UNIGRAM:
            return {symbol: chr(_PRIVATE_USE + number) for number, symbol in enumerate(symbols)}
        letters: dict[str, str] = {}
        stand_ins = {}
        for symbol in symbols:
            text = symbol.replace("▁", " ")
            if text != normalize(text):
                for letter in symbol:
                    letters.setdefault(letter, chr(_PRIVATE_USE + len(letters)))
                stand_ins[symbol] = "".join(map(letters.get, symbol))
        return stand_ins

    def _name(self, piece: str) -> str:
        bare = piece.strip("▁")
        if bare not in self._stand_ins:
            return piece
        return piece.replace(bare, self._stand_ins[bare])

    def _normalizers(self) -> list[dict]:
        spec, normalize = self.proto.normalizer_spec, self.processor.normalize
        rules = [_replace(symbol, letter) for symbol, letter in self._stand_ins.items()]
        if not spec.remove_extra_whitespaces and normalize("a\r\nb").endswith("a▁▁b"):
            rules.append(_replace("\r", "\n"))  # `tokenizers` would make one space of the two
        if spec.precompiled_charsmap:
            # `tokenizers` puts what its map has of a letter in place of the letter and its marks (its issues 2116 and
            # 2334). NFC joins most of them first. Lost are marks behind what NFC does not join: ½, fullwidth letters,
            # Arabic presentation forms. "lost by the tokenizer" in the plan counts them.
            if "ế" in normalize("e\u0302\u0301"):
                rules.append({"type": "NFC"})
            charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
            rules.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
        if spec.remove_extra_whitespaces:
            rules += [_replace(" {2,}", " ", "Regex"), _replace(r"\A | \z", "", "Regex")]
        for symbol, letter in self._stand_ins.items():
            if "▁" in symbol:
                rules.append(_replace(symbol.replace("▁", " "), letter))
        if spec.add_dummy_prefix:
            rules.append({"type": "Prepend", "prepend": "▁"})
        return rules

    @property
    def described(self) -> str:
        """ "a bpe model, normalization user_defined, with 2 symbols"."""
        trainer, symbols = self.proto.trainer_spec, len(self._pieces("USER_DEFINED"))
        kind = trainer.ModelType.Name(trainer.model_type).lower()
        text = f"a {kind} model, normalization {self.proto.normalizer_spec.name or 'none'}"
        return f"{text}, with {symbols} symbols" if symbols else text

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids by sentencepiece itself."""
        return self.processor.encode(texts)

    def probe_texts(self) -> list[str]:
        """Texts on which a conversion of the model is tried, its own symbols and normalization rules among them."""
        own = [piece.strip("▁") for piece in self._pieces("USER_DEFINED") if not SENTINEL_NAME.fullmatch(piece)]
        own += [piece.replace("▁", " ") for piece in own if "▁" in piece]
        if self.proto.normalizer_spec.name not in _BUILTIN_RULES:
            own += self._rule_sources()
        texts = probe_texts(self._pieces("NORMAL"))
        for part in own:
            texts += [part, f"a{part}b", f"a {part} b ", f" {part}{part}", f"\n{part}a", part * 3]
        return texts

    def _rule_sources(self) -> list[str]:
        """What the model's own normalization rules replace, NFKC's left out: keys of its double-array trie."""
        charsmap = self.proto.normalizer_spec.precompiled_charsmap
        if not charsmap:
            return []
        units = np.frombuffer(charsmap, "<u4", int.from_bytes(charsmap[:4], "little") // 4, 4).astype(np.int64)
        bases = (units >> 10) << ((units & 512) >> 6)  # a node's child stands at place XOR base XOR byte
        labels, sources, todo, followed = np.arange(1, 256), [], [(b"", int(bases[0]))], 0
        while todo:
            prefix, place = todo.pop()
            children = np.minimum(place ^ labels, len(units) - 1)
            for label in labels[(units[children] & (2**31 | 255)) == labels].tolist():
                if (followed := followed + 1) > len(units):  # each unit of a trie is one node
                    raise ValueError("its map of letters leads back to itself, or to a place in several ways")
                child, key = place ^ label, prefix + bytes([label])
                if units[child] >> 8 & 1:  # a key ends here
                    sources.append(key.decode())
                todo.append((key, child ^ int(bases[child])))
        own = []
        for source in sources:
            nfkc = unicodedata.normalize("NFKC", source).strip().replace(" ", "▁")
            if self.processor.normalize(source).strip("▁") != nfkc:
                own.append(source)
        return own


def _replace(pattern: str, content: str, kind: str = "String") -> dict:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def special_token(number: int, content: str) -> dict:
    """An entry of a tokenizer.json's added_tokens."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def space_marks(prepend: str) -> dict:
    """The rule that writes spaces as ▁, and one before "always" every part of a text, the "first", or "never" one."""
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend, "split": True}


def with_bytes(content: dict) -> dict:
    """The tokenizer.json with its bytes switched on: letters without a piece become their bytes, as in SentencePiece.

    transformers leaves them off when it converts a model. No text is read as the name of a byte.
    """
    content["model"]["byte_fallback"] = True
    if "ByteFallback" not in str(content["decoder"]):
        content["decoder"] = READS_BYTES
    if content["model"]["type"] == "Unigram" and str(CUTS_BYTE_NAMES) not in str(content["pre_tokenizer"]):
        rules = [rule for rule in (content["pre_tokenizer"], CUTS_BYTE_NAMES) if rule]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": rules}
    return content


def probe_texts(pieces: Iterable[str]) -> list[str]:
    """A few hundred texts: odd ones, and neighbouring pieces of a vocabulary as words and run together."""
    known = sorted(piece for piece in pieces if not SENTINEL_NAME.fullmatch(piece) and piece.strip("▁"))
    some = known[:: max(1, len(known) // 300)]
    texts, groups = list(ODD_TEXTS), len(some) // 3 + 1
    for start in range(groups):
        for joint in ("", " ", "▁"):
            texts.append(joint.join(some[start::groups]).replace("▁", " "))
    return texts


def check_same_ids(
    texts: list[str], found: list[list[int]], wanted: list[list[int]], shown: str, tool: str = "sentencepiece"
) -> None:
    """UserError, which begins with `shown` and shows the text, if one has other ids than the tool's own.

    The same tokens in another order are equally good: "..." is "." and "..", or ".." and "." by a rounding error.
    """
    for text, ids, own in zip(texts, found, wanted, strict=True):
        if sorted(ids) != sorted(own):
            raise UserError(
                f"{shown}: the text {text!r} gets the tokens {list(ids)[:12]} and by {tool} {list(own)[:12]}: this "
                "tokenizer cannot be used here; train one with create_tokenizer.py"
            )
