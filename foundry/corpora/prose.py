"""English prose out of documentation: docstrings, Markdown and reST, without code, tables, parameter lists and markup.

The way of a text: -> `_prose_lines` (code, tables, parameter lists are gone) -> `_paragraphs` (one line each) ->
`_plain` (markup is gone) -> `_prose` (only English sentences are left) -> {"summary", "body"}.
"""

import html
import re

MIN_CHARS = 60  # of a paragraph
SUMMARY_CHARS = (15, 120)

# ------------------------------------------------------------------------------------------- blocks that are no prose

_DROPPED_SECTIONS = frozenset(
    "parameters,parameter,other parameters,params,args,arg,arguments,keyword args,keyword arguments,kwargs,inputs,"
    "input,call arguments,returns,return,return value,return values,yields,yield,receives,outputs,output,raises,"
    "raise,throws,exceptions,warns,attributes,methods,properties,options,fields,keys,shape,type,types,side effects,"
    "references,reference,see also,license,licence,copyright,changelog,citation,bibtex,author,authors,todo".split(",")
)
_BLOCK_SECTIONS = _DROPPED_SECTIONS | {"example", "examples", "usage"}  # these hold prose too where underlined
_ADMONITIONS = {"note", "warning", "tip", "important", "hint", "caution", "attention", "admonition", "danger"}
_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}$")
_SECTION = re.compile(r"(?:\*\*)?([A-Za-z][A-Za-z -]{2,20}?)(?:\*\*)?\s*:(?:\*\*)?(?:\s|:?$)")  # Args: | Returns: x
_FIELD = re.compile(r":[\w ]+(?: [^:`]*)?:(?:\s|$)|@\w+\b")  # :param x: ... | :rtype: ... | @param x: ...
_DIRECTIVE = re.compile(r"\.\.\s*([\w-]+)::\s*(.*)")  # .. note:: ...
_DOCTEST = re.compile(r">>>|In \[\d*\]:")
_BULLET = re.compile(r"(?:[-*+•]|\(?(?:\d{1,2}|[a-z])[.)])\s+(?=\S)")
_TABLE = re.compile(r"[|+].*[|+]$|[=\-+| ]{5,}$|.*\S {3,}\S.* {3,}\S|.*(?:\s\|\s.*){2}")


def _prose_lines(text: str):
    """Lines of a docstring, with "" in place of what is no prose.

    "Add.\\n\\nArgs:\\n    x: left.\\n\\nAs +.\\n\\n>>> add(1)\\n1" -> "Add.", "", "", "", "", "As +.", "", "", ""
    """
    lines = text.expandtabs(4).splitlines()
    fenced = doctest = dropped_section = False
    block = None  # lines indented deeper than this column belong to a dropped block
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        body, indent = line.strip(), len(line) - len(line.lstrip())
        directive, section = _DIRECTIVE.match(body), _SECTION.match(body)
        if body.startswith(("```", "~~~")) and not body[3:].endswith("```"):
            fenced = not fenced
        doctest = bool(body) and (doctest or bool(_DOCTEST.match(body)))
        if body and block is not None and indent <= block:
            block = None
        if not body or fenced or body.startswith(("```", "~~~", "#")) or _UNDERLINE.match(body):
            line = ""
        elif _UNDERLINE.match(following.strip()) and len(body) < 80:  # a title
            dropped_section, block, line = body.lower().rstrip(": ") in _DROPPED_SECTIONS, None, ""
        elif dropped_section or doctest or block is not None:
            line = ""
        elif directive and directive[1].lower() in _ADMONITIONS:
            yield ""
            line = " " * (indent + 4) + directive[2]
        elif body.startswith("..") or _FIELD.match(body) or (section and section[1].lower() in _BLOCK_SECTIONS):
            block, line = indent, ""
        elif body.endswith("::"):  # announces a literal block
            block, line = indent, line.rstrip()[:-1]
        yield line


def _paragraphs(text: str) -> list[str]:
    """Paragraphs and list items of a docstring or file, each unwrapped into one line, with their markup."""
    paragraphs, current, column, is_table = [], [], 0, False
    for line in [*_prose_lines(text), ""]:
        body, indent = re.sub(r"^> ?(\[!\w+\])?", "", line.strip()), len(line) - len(line.lstrip())
        bullet = _BULLET.match(body)
        # A blank line, a bullet and a change of indentation start a paragraph; the second line of an item tells its
        # column. A wrapped line may begin with "1." or "a)" too, so these start an item only where one is expected.
        starts_item = bullet and (not current or column is None or not body[0].isalnum())
        if current and (not body or starts_item or column not in (None, indent)):
            if not is_table:
                paragraphs.append(" ".join(current))
            current, is_table = [], False
        if not current:
            column = None if bullet else indent
            body = body[bullet.end() :] if bullet else body
        elif column is None:
            column = indent
        if body:
            current.append(body)
            is_table = is_table or bool(_TABLE.match(line.strip()))
    return paragraphs


# ------------------------------------------------------------------------------------------------ markup inside a line


def _role_text(match: re.Match) -> str:
    """:class:`~torch.nn.Linear` -> Linear, :func:`the mean <numpy.mean>` -> the mean"""
    text = re.sub(r"(?<=.)\s*<[^>]*>$", "", match[1].strip())
    return text.rsplit(".", 1)[-1] if text.startswith("~") else text.lstrip("!.")


_MARKUP = [
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"!\[[^\]]*\]\([^)]*\)", ""),  # images, badges
        (r":[\w:+.-]+:`([^`]+)`(?:__?\b)?", _role_text),
        (r"\[`(~?[^`\]]+)`\](?:\([^)]*\))?", _role_text),  # [`~Trainer.train`], as transformers links
        (r"\[([^\]\[]+)\]\((?:[^()]|\([^)]*\))*\)", r"\1"),
        (r"`([^`<]+?)\s*<[^`>]+>`__?", r"\1"),
        (r"\b(?:in|from|of|by|to|see|and|with|ref\.?)\s*\[[\w#*-]+\]_(?!\w)", "©"),  # `_prose` drops the sentence
        (r"\s?\[[\w#*-]+\]_(?!\w)", ""),
        (r"``([^`]+)``", r"\1"),
        (r"`(~?[^`]+)`(?:__?(?!\w))?", _role_text),
        (r"(?<![\w$\\])\$([^$\\{}]{1,40})\$", r"\1"),
        (r"\*\*(?=\S)([^*]+?)(?<=\S)\*\*", r"\1"),
        (r"(?<![\w*])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?![\w*])", r"\1"),
        (r"</?(?:[abipu]|br|div|img|span|su[bp]|h\d|li|[uo]l|code|pre|em|strong|center|details|tip)\b[^<>]*>", ""),
        (r"\\([ *_`|<>])", lambda match: match[1].strip()),
        (r"\(\s+\)", ""),
        (r"\s+", " "),
        (r" (?=[.,;:!?](?:\s|$))", ""),
    )
]


def _plain(paragraph: str) -> str:
    """See :func:`~torch.add` and **not** `mul` [1]_. -> See add and not mul."""
    for pattern, replacement in _MARKUP:
        paragraph = pattern.sub(replacement, paragraph)
    return html.unescape(paragraph).strip()


# ------------------------------------------------------------------------------------------------------ English prose

# The "1." of a list that was wrapped into a paragraph ends no sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\s\d\.)\s+(?=[A-Z\"'(])|(?<=[.!?][\"')])\s+(?=[A-Z\"'(])")
_ENDS_WELL = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bal)(?<!\bcf)(?<![.])[.!?][\"')\]]?$")
# URLs, e-mail addresses, LaTeX, placeholders, leftovers of markup and code, signs outside Latin text
_NO_SENTENCE = re.compile(
    r"https?:|www\.|\w@\w+\.|[\\$`{}|©]|>>>|::|:\w+:|%\(|==|TODO|FIXME|^[^A-Za-z]*$|^[^\w\"'(]|"
    r"[^\x20-\x7e\xa0-\u024f\u2010-\u2026]"
)
_LEGALESE = re.compile(
    r"copyright|\(c\) ?\d|licen[cs]ed? (?:under|agreement)|permission is hereby|warrant(?:y|ies)|redistribution|"
    r"rights reserved",
    re.IGNORECASE,
)
_PLAIN_WORD = re.compile(r"[\"'(\[]*[A-Za-z]?[a-z'’-]*[\"')\],.;:!?]*")
_STOP_WORDS = frozenset(
    "a about after all also an and any are as at be because been before but by can could do does each either for from "
    "given had has have how if in instead into is it its may more most must no not of on one only or other otherwise "
    "over same should so some such than that the their them then there these they this those to two under up use used "
    "using was we were what when where whether which while will with within without would you your".split()
)


def _prose(paragraph: str, min_chars: int = MIN_CHARS, stop_share: float = 0.22) -> str:
    """The sentences of a plain paragraph, or "" where what is left of it is no English prose.

    The bounds come from reading samples on both sides of each: the shares of stop words and of words without digits,
    dots and inner capitals (of all words), and of letters and blanks (of all characters).
    """
    sentences = _SENTENCE_END.split(paragraph)
    text = " ".join(s for s in sentences if _ENDS_WELL.search(s) and not _NO_SENTENCE.search(s))
    words = text.split()
    if len(text) < min_chars or len(words) < 3 or not text[0].isupper() or _LEGALESE.search(text):
        return ""
    stop_words = sum(word.strip("\"'(),.;:").lower() in _STOP_WORDS for word in words)
    plain_words = sum(bool(_PLAIN_WORD.fullmatch(word)) for word in words)
    letters = sum(character.isalpha() or character == " " for character in text)
    is_english = stop_words >= stop_share * len(words) and plain_words >= 0.7 * len(words)
    return text if is_english and letters >= 0.88 * len(text) else ""


def clean(text: str, is_api: bool) -> dict:
    """A docstring or file -> {"summary": str, "body": [paragraph, ...], "is_api": it is of a function or class}

    `summary` is the first paragraph where that is one short sentence, else "".
    """
    paragraphs = [_plain(paragraph) for paragraph in _paragraphs(text)]
    summary = ""
    if paragraphs and text.lstrip()[:8] == paragraphs[0][:8] and len(_SENTENCE_END.split(paragraphs[0])) == 1:
        summary = _prose(paragraphs[0], min_chars=SUMMARY_CHARS[0], stop_share=0.12)
        summary = summary if len(summary) <= SUMMARY_CHARS[1] else ""
    body = [prose for paragraph in paragraphs[bool(summary) :] if (prose := _prose(paragraph))]
    return {"summary": summary, "body": body, "is_api": is_api}
