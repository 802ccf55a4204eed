"""Tests of foundry.corpora.prose: what of a docstring or text file is English prose, by example."""

from absl.testing import parameterized

from foundry.corpora.prose import MIN_CHARS, clean

PROSE = "The values are taken from the table that was given, and all of them are kept in the order of the rows."


class CleaningTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "wrapped lines become one",
            "The values are taken from the table\nthat was given to this function.",
            ["The values are taken from the table that was given to this function."],
        ),
        (
            "doctest",
            f"{PROSE}\n\n>>> print('The one that is printed is not part of the prose of this.')\nThe output.\n",
            [PROSE],
        ),
        ("fenced code", f"```python\n{PROSE}\n```\n\n{PROSE}", [PROSE]),
        ("literal block", f"{PROSE[:-1]}::\n\n    {PROSE}\n\n{PROSE}", [PROSE]),
        ("sentence that announces code", f"{PROSE} This is how it is used:\n\n>>> f()", [PROSE]),
        (
            "numpydoc parameters",
            f"{PROSE}\n\nParameters\n----------\nx : int\n    {PROSE}\n\nNotes\n-----\n{PROSE}",
            [PROSE, PROSE],
        ),
        ("Google arguments", f"{PROSE}\n\nArgs:\n    x: {PROSE}\n\n        {PROSE}\n\n{PROSE}", [PROSE, PROSE]),
        ("Google result on one line", f"{PROSE}\n\nReturns: {PROSE}", [PROSE]),
        ("Sphinx fields", f"{PROSE}\n\n:param x: The value that is taken,\n    {PROSE}\n:returns: {PROSE}", [PROSE]),
        ("admonition", f".. note::\n    {PROSE}", [PROSE]),
        ("directive", f".. deprecated:: 1.2\n    {PROSE}\n\n{PROSE}", [PROSE]),
        ("GitHub admonition", f"> [!TIP]\n> {PROSE}", [PROSE]),
        (
            "list items",
            f"- {PROSE}\n- This is the second item of the list,\n  and it has a second line as well.",
            [PROSE, "This is the second item of the list, and it has a second line as well."],
        ),
        (
            "wrapped list",
            "It does this: 1. Take what is given to it 2. Keep all of that. See https://a.b for it.",
            ["It does this: 1. Take what is given to it 2. Keep all of that."],
        ),
        ("titles", f"# The title of it\n\nA title that is underlined.\n===========\n{PROSE}", [PROSE]),
        ("table", f"| The name of it | What it is for. |\n|---|---|\n| {PROSE} | {PROSE} |\n\n{PROSE}", [PROSE]),
        (
            "roles",
            "This is what :func:`~a.b.solve` does if :class:`the class <a.B>` has a ``shape`` of its own.",
            ["This is what solve does if the class has a shape of its own."],
        ),
        (
            "links, emphasis",
            "See the [user guide](a.html) for **all** of the *options* or `the paper <b.html>`_ on it.",
            ["See the user guide for all of the options or the paper on it."],
        ),
        (
            "transformers links",
            "This is the model that [`~A.train`] trains and that [`BertModel`] is based on.",
            ["This is the model that train trains and that BertModel is based on."],
        ),
        (
            "tokens in angle brackets stay",
            "The tokens `<s>` and ``</s>`` are at the start and at the end of each text.",
            ["The tokens <s> and </s> are at the start and at the end of each text."],
        ),
        (
            "footnote",
            "This is the method of the authors [1]_, as it was in the first of their two papers.",
            ["This is the method of the authors, as it was in the first of their two papers."],
        ),
        ("URL, LaTeX, reference", f"{PROSE} See https://a.b for it. It is $\\alpha$. More is in [1]_.", [PROSE]),
        ("licence", "Permission is hereby granted, free of charge, to any person that has a copy of it.", []),
        ("German", "Die Werte werden aus der Tabelle genommen, die gegeben war, und behalten ihre Reihenfolge.", []),
        ("too short", "The values are kept.", []),
        ("no end", "The values are taken from the table that was given and all of them are kept in", []),
        ("code", "X = f(a.b, c_d) if g(h_i) else j[k], L = m(n_o); P.q(r, s=t_u, v=w_x); Y = z(a_b, c=d)(e).", []),
    )
    def test_keeps_only_prose(self, text, expected):
        doc = clean(text, is_api=True)
        kept = [doc["summary"], *doc["body"]] if len(doc["summary"]) >= MIN_CHARS else doc["body"]
        self.assertEqual(kept, expected)

    @parameterized.named_parameters(
        ("one sentence", "Return the sum.", "Return the sum."),
        ("wrapped", "Return the sum\nof all the values.", "Return the sum of all the values."),
        ("two sentences", "Return the sum. It is exact.", ""),
        ("no full stop", "Return the sum", ""),
        ("too long", "Return the sum of " + "all the values and " * 6 + "more.", ""),
        ("signature", "add(x, y) -> int", ""),
    )
    def test_summary_is_one_short_sentence(self, first_paragraph, expected):
        doc = clean(f"{first_paragraph}\n\n{PROSE}", is_api=True)
        self.assertEqual(doc["summary"], expected)
        self.assertEqual(doc["body"][-1:], [PROSE])
