"""Tests of foundry/modeling/decoding.py: the answers are those of `generate`, alone, in any batch and in any slot."""

import os
import random
from unittest import mock

import peft
import torch
import zoo
from absl.testing import parameterized
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from foundry.model_t5 import create_model
from foundry.modeling import decoding_layers, found_answers, onednn
from foundry.modeling.decoding import Search, Source, answers, unsupported_model_reason, unsupported_search_reason
from foundry.modeling.decoding_layers import DECODERS, Held, Layers, Matrices
from foundry.modeling.families import family_of, is_tied
from foundry.modeling.found_answers import PLAIN, AnswerFinder, log_probabilities
from foundry.modeling.generation_settings import complete
from foundry.modeling.products import use_fast_products

WORDS = 300
WRITTEN_OUT = [name for name in zoo.FAMILIES if name not in zoo.GEMMA]
ENDS = [1, *range(10, 60, 3)]  # so that answers end at different places
BEAMS = dict(num_beams=3, num_return_sequences=2)
RULES = [
    ("greedy", dict()),
    ("long", dict(max_new_tokens=80, eos_token_id=1)),
    ("ngrams", dict(no_repeat_ngram_size=2, eos_token_id=1)),
    ("repetition", dict(repetition_penalty=1.7, min_new_tokens=4)),
    ("tokens", dict(suppress_tokens=[5, 7, 9], begin_suppress_tokens=[1, 10], forced_bos_token_id=6, min_length=3)),
    ("last", dict(forced_eos_token_id=1, bad_words_ids=[[8], [9, 11]], sequence_bias=[[[12], 2.0]], eos_token_id=1)),
    ("decay", dict(exponential_decay_length_penalty=(3, 1.4), eos_token_id=1)),
    ("beams", BEAMS),
    ("long_beams", BEAMS | dict(length_penalty=2.0, max_new_tokens=24, eos_token_id=1)),
    ("early_beams", BEAMS | dict(early_stopping=True, length_penalty=-0.7)),
    ("never_beams", BEAMS | dict(early_stopping="never", no_repeat_ngram_size=2)),
    ("beams_of_one_end", BEAMS | dict(eos_token_id=1, min_new_tokens=3, repetition_penalty=1.3)),
]


def made_model(family: str = "t5_v1_1", plain: bool = False, **changes):
    """A model whose logits are far from each other. plain: as transformers makes it, with the embedding as head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**zoo.config_of(family, WORDS) | changes)
    if plain:
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        family_of(config).prepare(model, is_new=False)
    else:
        model = create_model(config)
    complete(model.eval().requires_grad_(False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.update(eos_token_id=ENDS, max_length=None)
    return model


def made_sources(count: int) -> list[list[int]]:
    chooser = random.Random(0)
    return [[*chooser.choices(range(3, WORDS), k=chooser.randint(0, 24)), 1] for _ in range(count)]


def generated(model, sources: list[list[int]], **settings) -> list[list[int]]:
    """The answers of `generate`, up to their ends."""
    width, ends = max(map(len, sources)), settings.get("eos_token_id", ENDS)
    ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sources])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sources])
    written = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **settings)[:, 1:].tolist()
    ends = ends if isinstance(ends, list) else [ends]
    places = [next((place for place, token in enumerate(row) if token in ends), len(row)) for row in written]
    return [row[: place + 1] for row, place in zip(written, places, strict=True)]


def found(model, sources: list[list[int]], slots: int, draws=None, **settings) -> list:
    """The answers of the loop."""
    search = Search.of(model, scored=True, **{"do_sample": False, "max_new_tokens": 12, **settings})
    rows = [Source(ids, search.limit, draws=None if draws is None else draws[n]) for n, ids in enumerate(sources)]
    answers([Layers(model)], rows, search, slots)
    return [answer for row in rows for answer in row.answers]


class SameAnswersTest(parameterized.TestCase):
    @parameterized.parameters(*WRITTEN_OUT)
    def test_those_of_generate(self, family):
        """Searches without rules and with all of them, in batches of any size."""
        model, sources, lengths = made_model(family), made_sources(9), set()
        for name, changes in RULES:
            settings = dict(max_new_tokens=12) | changes
            wanted = generated(model, sources, **settings)
            lengths.update(map(len, wanted))
            for slots in (1, 4):
                with self.subTest(name, slots=slots):
                    got = [answer.tokens for answer in found(model, sources, slots, **settings)]
                    self.assertEqual(got, wanted)
        self.assertGreater(len(lengths), 5)  # slots become free at different times

    @parameterized.parameters(
        dict(num_layers=1, num_decoder_layers=3),
        dict(num_layers=3, num_decoder_layers=1),
        dict(feed_forward_proj="relu"),
        dict(d_kv=6, num_heads=3),
    )
    def test_of_other_shapes(self, **changes):
        model, sources = made_model(**changes), made_sources(9)
        for search in (dict(), BEAMS):
            wanted = generated(model, sources, max_new_tokens=12, **search)
            self.assertEqual([answer.tokens for answer in found(model, sources, 4, **search)], wanted)

    def test_the_cache_grows_and_what_a_row_does_not_see_does_not_spread(self):
        """The cache has 4 columns at first; sources that begin late see none of the columns before. What a row does not
        see may be any number, also none, but is multiplied by 0."""
        model, sources = made_model(), made_sources(23)
        wanted = generated(model, sources, max_new_tokens=30)
        taken = [torch.full((64, 300), torch.nan) for _ in range(50)]  # memory that is given back full of nan
        del taken
        with mock.patch.object(decoding_layers, "COLUMNS", 4):
            self.assertEqual([one.tokens for one in found(model, sources, 3, max_new_tokens=30)], wanted)

    @parameterized.product(family=zoo.FAMILIES, plain=(False, True))
    def test_scores_are_those_of_a_forward_pass(self, family, plain):
        """Where the head is the embedding too, whose input some families scale and others do not."""
        model = made_model(family, tie_word_embeddings=plain) if family in zoo.GEMMA else made_model(family, plain)
        self.assertEqual(is_tied(model), plain or family == "t5_v1_0")
        start = model.generation_config.decoder_start_token_id
        for search in (dict(), BEAMS, BEAMS | dict(repetition_penalty=1.5)):
            rows = [Source(ids) for ids in made_sources(5)]
            AnswerFinder(model, 4).find(rows, scored=True, max_new_tokens=12, **search)
            for row in rows:
                self.assertLen(row.answers, search.get("num_return_sequences", 1))
                for answer in row.answers:
                    given = torch.tensor([[start, *answer.tokens[:-1]]])
                    logits = model(input_ids=torch.tensor([row.ids]), decoder_input_ids=given).logits[0]
                    wanted = logits.log_softmax(-1)[range(len(answer.tokens)), answer.tokens].sum().item()
                    self.assertAlmostEqual(answer.nats, wanted, delta=1e-4)

    def test_beams_have_the_scores_of_generate(self):
        model, (source,) = made_model(), made_sources(1)
        settings = BEAMS | dict(num_return_sequences=3, max_new_tokens=12, length_penalty=0.6)
        output = dict(return_dict_in_generate=True, output_scores=True)
        wanted = model.generate(torch.tensor([source]), do_sample=False, **settings, **output).sequences_scores
        for answer, score in zip(found(model, [source], 1, **settings), wanted.tolist(), strict=True):
            self.assertAlmostEqual(answer.nats / len(answer.tokens) ** 0.6, score, delta=1e-5)

    def test_draws_are_the_same_alone_in_any_batch_and_slot(self):
        model, sources = made_model(), made_sources(11)
        draws = torch.rand(11, 3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        draws[:, 2] = torch.nan  # the likeliest
        settings = dict(do_sample=True, num_return_sequences=3, top_k=20, temperature=1.5)
        alone = [found(model, [ids], 1, draws[n : n + 1], **settings) for n, ids in enumerate(sources)]
        wanted = [answer.tokens for answers_of_one in alone for answer in answers_of_one]
        self.assertEqual(wanted[2::3], generated(model, sources, max_new_tokens=12))
        self.assertNotEqual(wanted[0::3], wanted[1::3])
        for slots in (2, 11):
            self.assertEqual([one.tokens for one in found(model, sources, slots, draws, **settings)], wanted)

    def test_a_token_is_drawn_by_the_number_of_its_place(self):
        """It is the first one whose cumulated probability is larger, by the model's own forward pass."""
        model, (source, *_) = made_model(), made_sources(1)
        draws = torch.rand(1, 3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        settings = dict(do_sample=True, num_return_sequences=3, temperature=1.5, top_k=0)
        for numbers, answer in zip(draws[0], found(model, [source], 1, draws, **settings), strict=True):
            self.assertGreater(len(answer.tokens), 1)
            given = torch.tensor([[model.config.decoder_start_token_id, *answer.tokens[:-1]]])
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=given).logits[0].double()
            sums = (logits / 1.5).softmax(-1).cumsum(-1)
            wanted = sums.gt(numbers[: len(given[0]), None]).int().argmax(-1)
            self.assertEqual(answer.tokens, wanted.tolist())

    def test_an_answer_ends_where_it_is_told_to(self):
        """`watch` says so at the second token of each answer, but the first one's; limits are those of each source."""
        model, sources = made_model(), made_sources(5)
        wanted = generated(model, sources, max_new_tokens=9, eos_token_id=1)
        seen: list[list[int]] = [[] for _ in sources]
        rows = [Source(ids, limit) for ids, limit in zip(sources, (9, 9, 9, 9, 1), strict=True)]
        for number, row in enumerate(rows):

            def watch(token: int, number: int = number) -> bool:
                seen[number].append(token)
                return number > 0 and len(seen[number]) == 2

            row.watch = watch
        answers([Layers(model)], rows, Search.of(model, max_new_tokens=9, eos_token_id=1), 3)
        got = [row.answers[0].tokens for row in rows]
        self.assertEqual(got, [wanted[0], *(tokens[:2] for tokens in wanted[1:4]), wanted[4][:1]])
        self.assertEqual(got, seen)


class CallsTest(parameterized.TestCase):
    def test_a_token_of_one_text_takes_few_calls(self):
        """Of a small model each takes longer than what it computes."""
        of_a_token = {}
        for layers in (1, 3):
            model, (source, *_) = made_model(num_decoder_layers=layers), made_sources(1)
            ready, search, found = [Layers(model)], Search.of(model, max_new_tokens=9, eos_token_id=1), []
            for tokens in (4, 4, 9):  # the first makes what is kept
                row = Source(source, tokens)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    answers(ready, [row], search, 1)
                self.assertLen(row.answers[0].tokens, tokens)
                found.append(sum(not event.cpu_children for event in profile.events()))
            of_a_token[layers] = (found[2] - found[1]) / 5
        self.assertLessEqual((of_a_token[3] - of_a_token[1]) / 2, 65)  # of a layer
        self.assertLessEqual(of_a_token[1], 95)


def random_search(chooser: random.Random) -> dict:
    """Settings of `generate`."""
    beams = chooser.choice([1, 1, 2, 3, 5])
    search = dict(max_new_tokens=chooser.randint(1, 30), eos_token_id=chooser.choice([1, ENDS, [1, 20]]))
    if beams > 1:
        search |= dict(num_beams=beams, num_return_sequences=chooser.randint(1, beams))
        search |= dict(length_penalty=chooser.choice([0.0, 0.6, 1.0, 2.0, -1.0]))
        search |= dict(early_stopping=chooser.choice([True, False, "never"]))
    rules = dict(
        no_repeat_ngram_size=chooser.randint(1, 3),
        repetition_penalty=chooser.uniform(0.8, 2.0),
        min_new_tokens=chooser.randint(1, search["max_new_tokens"]),
        suppress_tokens=chooser.sample(range(WORDS), 9),
        forced_eos_token_id=1,
    )
    return search | dict(chooser.sample(list(rules.items()), chooser.randint(0, 2)))


class RandomSearchesTest(parameterized.TestCase):
    def test_they_find_the_answers_of_generate(self):
        """`make torture` draws more of them."""
        seed, cases = int(os.environ.get("T5_FUZZ_SEED", 0)), int(os.environ.get("T5_FUZZ_CASES", 8))
        for case in range(cases):
            chooser = random.Random(f"{seed} {case}")
            shape = dict(num_layers=chooser.randint(1, 3), num_decoder_layers=chooser.randint(1, 3))
            shape |= dict(num_heads=chooser.randint(1, 5), d_kv=chooser.randint(2, 9))
            family, search = chooser.choice(WRITTEN_OUT), random_search(chooser)
            model, sources = made_model(family, **shape), made_sources(chooser.randint(1, 12))
            wanted = generated(model, sources, **search)
            got = found(model, sources, chooser.randint(1, 12), **search)
            self.assertLen(got, len(wanted))
            for number, (answer, tokens) in enumerate(zip(got, wanted, strict=True)):
                if answer.tokens != tokens and "num_beams" in search:  # a tie that rounding decides is no difference
                    source = torch.tensor([sources[number // search["num_return_sequences"]]])
                    nats = log_probabilities(model, {"input_ids": source}, torch.tensor([[0, *tokens]]), 1).sum().item()
                    power = search["length_penalty"]
                    scores = answer.nats / len(answer.tokens) ** power, nats / len(tokens) ** power
                    self.assertAlmostEqual(*scores, delta=1e-4, msg=f"case {case}: {family}, {shape}, {search}")
                else:
                    self.assertEqual(answer.tokens, tokens, f"case {case}: {family}, {shape}, {search}")


class WhatGenerateDoesTest(parameterized.TestCase):
    def test_the_search_of_draws_lacks_nothing(self):
        self.assertIsNone(unsupported_search_reason(made_model(), **PLAIN, num_return_sequences=4))

    @parameterized.parameters(
        (dict(), None),
        (dict(do_sample=True), None),
        (dict(do_sample=True, num_beams=2), "beams are drawn"),
        (dict(encoder_no_repeat_ngram_size=2), "encoder_no_repeat_ngram_size"),
        (dict(encoder_repetition_penalty=1.5), "encoder_repetition_penalty"),
    )
    def test_it_says_why(self, changes, reason):
        told = unsupported_search_reason(made_model(), **changes)
        self.assertRegex(told or "", reason) if reason else self.assertIsNone(told)

    def test_no_family_is_left_out_in_silence(self):
        for family in zoo.FAMILIES:
            model_type = zoo.CONFIGS[family]["model_type"]
            self.assertEqual(family in WRITTEN_OUT, model_type in DECODERS)

    @parameterized.parameters("t5gemma", "t5gemma2")
    def test_generate_takes_what_the_loop_lacks(self, family):
        """Draws, limits, watches and scores are the caller's as in the loop, and a printed line says why, once."""
        model, sources, got = made_model(family), made_sources(5), []
        draws = torch.rand(5, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found_answers.tell_that_generate_answers.cache_clear()
        with mock.patch.object(found_answers, "print_once") as told:
            for size in (1, 5):
                rows = [Source(ids, 6, draws=draws[number]) for number, ids in enumerate(sources)]
                settings = dict(do_sample=True, num_return_sequences=2, max_new_tokens=6, top_k=9)
                AnswerFinder(model, size).find(rows, scored=True, **settings)
                got.append([answer.tokens for row in rows for answer in row.answers])
                self.assertTrue(all(answer.nats < 0 for row in rows for answer in row.answers))
        self.assertEqual(*got)
        told.assert_called_once()
        self.assertIn("written out", told.call_args.args[0])

    @parameterized.parameters(*RULES[:7])
    def test_generate_draws_as_the_loop(self, _, changes):
        """By the same numbers, under the same rules, each source with its own temperature."""
        model, sources, got = made_model(), made_sources(7), []
        model.generation_config.update(**changes)
        draws = torch.rand(7, 3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for reason in (None, "as if it lacked something"):
            rows = [Source(ids, 12, draws=draws[number]) for number, ids in enumerate(sources)]
            for row in rows[1:]:
                row.warp = lambda scores, row=row: scores / (3 + len(row.ids) / 9)
            finder = AnswerFinder(model, 3)
            finder.model_unsupported = reason
            finder.find(rows, do_sample=False, num_return_sequences=3, **dict(max_new_tokens=12) | changes)
            got.append([answer.tokens for row in rows for answer in row.answers])
        self.assertGreater(len({*map(tuple, got[0])}), 14)
        self.assertEqual(*got)

    @parameterized.product(slots=(1, 4), warms=(False, True))
    def test_drawn_answers_repeat_nothing_of_the_source(self, slots, warms):
        """Whether they are alone or beside longer ones, at any temperature."""
        model, sources = made_model(), made_sources(9)
        model.generation_config.update(encoder_no_repeat_ngram_size=1, eos_token_id=2)
        draws = torch.rand(9, 3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows = [Source(ids, 12, draws=draws[number]) for number, ids in enumerate(sources)]
        for row in rows if warms else ():
            row.warp = lambda scores: scores / 9
        AnswerFinder(model, slots).find(rows, do_sample=False, num_return_sequences=3, max_new_tokens=12)
        for row in rows:
            for answer in row.answers:
                self.assertNoCommonElements(answer.tokens, row.ids)

    def test_drawn_answers_have_the_penalty_of_the_sources_tokens(self):
        """Each token is the first whose cumulated probability is larger, where logits of the source's tokens are
        multiplied or divided by the penalty: transformers makes them likelier by a penalty above 1."""
        model, sources = made_model(), made_sources(4)
        model.generation_config.update(encoder_repetition_penalty=1.8)
        draws = torch.rand(4, 2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows = [Source(ids, 12, draws=draws[number]) for number, ids in enumerate(sources)]
        AnswerFinder(model, 4).find(rows, do_sample=False, num_return_sequences=2, max_new_tokens=12)
        for row in rows:
            for numbers, answer in zip(row.draws, row.answers, strict=True):
                given = torch.tensor([[0, *answer.tokens[:-1]]])
                logits = model(input_ids=torch.tensor([row.ids]), decoder_input_ids=given).logits[0].double()
                own = logits[:, row.ids]
                logits[:, row.ids] = torch.where(own > 0, own * 1.8, own / 1.8)
                sums = logits.softmax(-1).cumsum(-1)
                wanted = sums.gt(numbers[: len(given[0]), None]).int().argmax(-1)
                self.assertEqual(answer.tokens, wanted.tolist())


class ReorderedRowsTest(parameterized.TestCase):
    @parameterized.parameters(1, 4)
    def test_columns_that_are_not_copied_are_those_of_the_row_itself(self, slots):
        """A row's memory is what its parent has written, though only columns behind their common beginning are copied.
        Sources begin in other columns as slots become free."""
        model, sources, copied = made_model(), made_sources(9), []
        reorder, kept = decoding_layers.KVCache.reorder, 0

        def checked(memory, parents):
            nonlocal kept
            alike = [memory.alike[row // 4].get((row % 4, parent % 4), 1) - 1 for row, parent in enumerate(parents)]
            used = memory.cache[:, :, : len(parents), :, memory.begin : memory.end]
            wanted = used[:, :, parents].clone()
            reorder(memory, parents)
            self.assertTrue(torch.equal(used, wanted))
            changed = [row for row, parent in enumerate(parents) if row != parent]
            copied.append(len(changed))
            kept += sum(alike[row] for row in changed)

        with mock.patch.object(decoding_layers.KVCache, "reorder", checked):
            found(model, sources, slots, num_beams=4, max_new_tokens=20, eos_token_id=1)
        self.assertGreater(sum(copied), 20)
        self.assertGreater(kept, 20)


class ProductsTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_linear_layers(self, amd):
        """The same values and gradients by either library; compiled or bfloat16 products are torch's own."""
        torch.manual_seed(0)
        for width, rows in ((24, 40), (40, 24)):
            layer = torch.nn.Linear(32, width, bias=False)
            x = torch.randn(2, rows, 32).transpose(0, 1).requires_grad_()
            wanted = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
            use_fast_products(layer)
            with (
                mock.patch.object(onednn, "is_amd", lambda: amd),
                mock.patch.object(onednn, "LEAST", 0),
                mock.patch.object(onednn, "product", wraps=onednn.product) as product,
            ):
                y = layer(x)
                self.assertEqual(product.call_count, amd)
                found = torch.autograd.grad(y.square().sum(), [x, layer.weight])
                self.assertEqual(product.call_count, 3 * amd)
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
                torch.testing.assert_close(y, x @ layer.weight.T)
                with torch.autocast("cpu", torch.bfloat16):
                    layer(x).sum().backward()
                torch.compile(layer, backend="eager")(x).sum().backward()
                self.assertEqual(product.call_count, 3 * amd)

    def test_bfloat16_on_a_cpu_without_avx512(self):
        """OneDNN neither packs nor multiplies it there."""
        layer, x = torch.nn.Linear(512, 512, bias=False), torch.randn(3, 512).bfloat16()
        with mock.patch.object(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False):
            (found,) = Matrices([layer], torch.bfloat16, Held.PACKED)(x)
            torch.testing.assert_close(found.float(), x.float() @ layer.weight.T, atol=0.05, rtol=0.02)
            (packed,) = Matrices([layer], torch.float32, Held.PACKED).weights
            self.assertTrue(packed.is_mkldnn)

    def test_few_multiplications_are_left_to_torch(self):
        with mock.patch.object(onednn, "is_amd", lambda: True):
            for rows, is_faster in ((1, False), (2**14, True)):
                self.assertEqual(onednn.is_faster(torch.ones(rows, 8), torch.ones(8, 8)), is_faster)

    @parameterized.parameters((2**21, False), (0, True))
    def test_one_row_is_multiplied_by_what_is_quicker(self, cached, by_onednn):
        """By MKL where all matrices stay in the processor's cache, else by oneDNN; several rows always by oneDNN."""
        model, sources = made_model(), made_sources(6)
        wanted = generated(model, sources, max_new_tokens=12)
        with (
            mock.patch.multiple(decoding_layers, CACHED=cached, LARGE=0),
            mock.patch.object(decoding_layers, "product", wraps=onednn.product) as product,
        ):
            for slots, is_called in ((1, by_onednn), (4, True)):
                product.reset_mock()
                self.assertEqual([one.tokens for one in found(model, sources, slots)], wanted)
                self.assertEqual(product.called, is_called)

    def test_lora_answers_as_it_reads(self):
        """Answers of a model with LoRA's matrices, which are added to those of the loop."""
        model, sources = made_model(), made_sources(6)
        config = peft.LoraConfig(r=2, target_modules=["q", "v", "wi_0"], init_lora_weights=False)
        adapted = peft.inject_adapter_in_model(config, model).eval().requires_grad_(False)
        self.assertIsNone(unsupported_model_reason(adapted))
        wanted = generated(adapted, sources, max_new_tokens=12)
        self.assertEqual([one.tokens for one in found(adapted, sources, 4)], wanted)
        self.assertNotEqual(wanted, generated(made_model(), sources, max_new_tokens=12))
