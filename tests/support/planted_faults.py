"""Small mistakes planted into a copy of the checkout, one at a time, each of which the tests must notice:

    python tests/support/planted_faults.py                      # all of them; exit code 1 if one is not caught
    python tests/support/planted_faults.py --only dpo_sign      # one, or several names
    python tests/support/planted_faults.py --list
    python tests/support/planted_faults.py --whole_suite        # with all tests, not only the files named here

A line says of each fault whether it is caught, NOT caught, or does not apply, since its old text does not stand exactly
once in its file. Before the first fault the same tests must pass without one. `tests/unit/test_planted_faults.py` holds
that every fault applies to the code as it is.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """file: in the checkout. old: what stands there, exactly once; new: what is planted instead. tests: the files below
    tests/ that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def places(self, root: Path) -> int:
        """How often the old text stands in the file; 0 where there is no such file."""
        path = root / self.file
        return path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0


COLLATOR = ["unit/test_data_collator_t5.py"]
PACKED = ["features/ul2/test_packed_rows.py", "features/documents/test_document_packing.py"]
LOSS = ["slow/test_step.py"]
STREAMS = ["features/streams/test_streams.py"]
WHOLE = ["slow/test_checkpoints.py"]
PREFERENCES = ["features/preferences/test_preferences.py"]
DISTILLATION = ["features/distillation/test_distillation.py"]
REWARDS = ["features/rewards/test_rewards.py"]
AVERAGES = ["features/moving_average/test_moving_average.py"]
METRICS = ["unit/test_metrics.py"]
DATA = ["unit/test_data_t5.py"]
OPTIMIZERS = ["unit/test_optimizers.py"]
EXPORTS = ["unit/test_exports.py"]
TRAINER = ["slow/test_trainer_t5.py"]
RERANK = ["features/rerank/test_rerank.py"]

FAULTS = [
    # ------------------------------------------------------------ answers that are drawn and chosen
    Fault(
        "draws_of_one_step",
        "foundry/modeling/decoding.py",
        "source.draws[:, min(place.length, source.limit - 1)]",
        "source.draws[:, 0]",
        ["unit/test_decoding.py"],
    ),
    Fault(
        "draws_by_place_in_the_batch",
        "tasks/answering.py",
        "uniform_numbers(plan.args.seed, texts, plan.count, plan.limit)",
        "uniform_numbers(plan.args.seed, [(n,) for n, _ in enumerate(texts)], plan.count, plan.limit)",
        ["unit/test_predict_t5.py"],
    ),
    Fault(
        "repeated_answers_count_once",
        "features/rerank/similarity.py",
        "totals = pairs @ times - pairs.diagonal()",
        "totals = pairs.sum(axis=1) - pairs.diagonal()",
        RERANK,
    ),
    Fault(
        "precision_for_recall",
        "features/rerank/similarity.py",
        "weighted = BETA**2 * precision + recall",
        "weighted = BETA**2 * recall + precision",
        RERANK,
    ),
    Fault(
        "source_with_the_prefix",
        "features/rerank/__init__.py",
        "[text.removeprefix(prefix) for text in texts]",
        "[text for text in texts]",
        RERANK,
    ),
    # ------------------------------------------------------------ the collator
    Fault(
        "mask_begins_masked",
        "data_collator_t5.py",
        "kept_masked = np.tile(np.array([False, True]), batch * num_spans)",
        "kept_masked = np.tile(np.array([True, False]), batch * num_spans)",
        COLLATOR,
    ),
    Fault(
        "sentinels_in_reverse",
        "data_collator_t5.py",
        "sentinels = np.tile(sentinel_ids[:num_spans], batch)",
        "sentinels = np.tile(sentinel_ids[:num_spans][::-1], batch)",
        COLLATOR,
    ),
    Fault(
        "one_raw_token_less",
        "data_collator_t5.py",
        "noise_density, mean_noise_span_length)[0] <= inputs_length:",
        "noise_density, mean_noise_span_length)[0] < inputs_length:",
        COLLATOR,
    ),
    Fault(
        "masks_without_the_seed",
        "data_collator_t5.py",
        "return random_numbers(seed_key ^ examples.astype(np.uint64), 1)[:, 0]",
        "return random_numbers(examples.astype(np.uint64), 1)[:, 0]",
        ["unit/test_data_collator_t5.py", "unit/test_data_t5.py"],
    ),
    Fault(
        "start_token_is_not_the_models",
        "data_collator_t5.py",
        "shifted = torch.full_like(labels, decoder_start_token_id)",
        "shifted = torch.full_like(labels, pad_token_id)",
        COLLATOR,
    ),
    # ------------------------------------------------------------ means of weights
    Fault(
        "a_checkpoint_has_the_trained_weights_as_its_model",
        "features/moving_average/averaged_weights.py",
        "self.show()\n        args = self.trainer.args",
        "args = self.trainer.args",
        AVERAGES,
    ),
    Fault(
        "a_resumed_average_begins_with_the_average",
        "features/moving_average/averaged_weights.py",
        "self.kept[name].copy_(tensor)",
        "self.kept[name].copy_(self.kept[name])",
        AVERAGES,
    ),
    Fault(
        "steps_are_made_with_the_average",
        "features/moving_average/averaged_weights.py",
        "if batches and self.is_shown:",
        "if not batches and self.is_shown:",
        AVERAGES,
    ),
    Fault(
        "the_mean_leaves_a_checkpoint_out",
        "features/averages/mean.py",
        "for folder in folders[:-1]:",
        "for folder in folders[1:-1]:",
        ["features/averages/test_averages.py"],
    ),
    # ------------------------------------------------------------ packed rows
    Fault(
        "segments_see_those_before",
        "foundry/modeling/segment_masks.py",
        "allowed = queries[:, :, None].eq(keys[:, None, :])",
        "allowed = queries[:, :, None].ge(keys[:, None, :])",
        ["unit/test_packing.py"],
    ),
    Fault(
        "packed_targets_see_the_next_token",
        "foundry/modeling/segment_masks.py",
        "allowed = allowed.tril()",
        "allowed = allowed.tril(1)",
        ["unit/test_packing.py"],
    ),
    Fault(
        "places_do_not_restart",
        "foundry/modeling/segment_masks.py",
        "return places - (places * begins).cummax(dim=1).values",
        "return places",
        ["features/gemma/test_gemma_families.py"],
    ),
    Fault(
        "packed_decoder_begins_with_the_example_before",
        "foundry/training/batching.py",
        '"decoder_input_ids": packed(decoder_inputs, self.pad_token_id),',
        '"decoder_input_ids": shift_right(packed(targets, IGNORE_INDEX), 0, self.pad_token_id),',
        ["slow/test_batching.py"],
    ),
    Fault(
        "only_the_first_example_has_a_start_token",
        "foundry/objectives/packed_rows.py",
        "decoder_inputs[target_ends - target_sizes] = self.decoder_start_token_id",
        "decoder_inputs[0] = self.decoder_start_token_id",
        PACKED,
    ),
    # ------------------------------------------------------------ the loss
    Fault(
        "loss_is_the_mean_of_each_micro_batch",
        "foundry/modeling/loss.py",
        "divisor = labels.ne(IGNORE_INDEX).sum() if num_items is None else num_items",
        "divisor = labels.ne(IGNORE_INDEX).sum()",
        TRAINER,
    ),
    Fault(
        "z_loss_of_padding_too",
        "foundry/modeling/loss.py",
        "return nats + z_loss * (log_z.square() * labels.ne(IGNORE_INDEX)).sum()",
        "return nats + z_loss * log_z.square().sum()",
        LOSS,
    ),
    Fault(
        "half_the_gradient_of_z_loss",
        "foundry/modeling/loss.py",
        ".exp_().mul_(1 + 2 * z_loss * log_z)",
        ".exp_().mul_(1 + z_loss * log_z)",
        LOSS,
    ),
    Fault(
        "gradient_without_smoothing",
        "foundry/modeling/loss.py",
        "found.scatter_add_(1, index, torch.full_like(log_z, label_smoothing - 1))",
        "found.scatter_add_(1, index, torch.full_like(log_z, -1.0))",
        LOSS,
    ),
    Fault(
        "loss_of_the_last_chunk",
        "foundry/modeling/loss.py",
        "total = total + (nats * counted[:, None]).sum()",
        "total = (nats * counted[:, None]).sum()",
        LOSS,
    ),
    Fault(
        "slope_of_the_soft_cap",
        "foundry/modeling/loss.py",
        "slope = 1 - bent.square() if wants_gradient else None",
        "slope = 1 - bent.abs() if wants_gradient else None",
        ["unit/test_families.py", "slow/test_step.py", "features/gemma/test_gemma_families.py"],
    ),
    # ------------------------------------------------------------ streams, the order of rows
    Fault(
        "every_pass_in_the_same_order",
        "features/streams/lanes.py",
        "blocks, random = len(self.corpus), self.random(0, number)",
        "blocks, random = len(self.corpus), self.random(0, 0)",
        STREAMS,
    ),
    Fault(
        "a_resumed_stream_reads_from_the_start",
        "features/streams/lanes.py",
        "MixedLane(self.sources, self.turns, lane, self.lane_states.get(lane))",
        "MixedLane(self.sources, self.turns, lane)",
        STREAMS,
    ),
    Fault(
        "a_stream_counts_its_own_rank",
        "features/streams/lanes.py",
        'after = state["next_example"] + stream.batch_size * stream.ranks',
        'after = state["next_example"] + stream.batch_size',
        STREAMS,
    ),
    Fault(
        "a_stream_draws_dropouts_numbers",
        "features/streams/lanes.py",
        "generator=torch.Generator(),  # DataLoader draws",
        "generator=None,  # DataLoader draws",
        STREAMS,
    ),
    Fault(
        "rest_of_the_units_is_lost",
        "features/streams/lanes.py",
        "yield [*where, skip + used - begin], unit",
        "yield [*where, skip], unit",
        STREAMS,
    ),
    Fault(
        "every_epoch_in_the_same_order",
        "foundry/corpora/chunks.py",
        "generator = np.random.default_rng([self.seed, self.epoch])",
        "generator = np.random.default_rng([self.seed])",
        DATA + TRAINER,
    ),
    Fault(
        "grouped_rows_in_the_same_order",
        "foundry/training/row_order.py",
        "self.generator.manual_seed(int(np.random.default_rng([self.seed, self.epoch])",
        "self.generator.manual_seed(int(np.random.default_rng([self.seed])",
        TRAINER,
    ),
    Fault(
        "a_mixture_repeats_its_first_rows",
        "tasks/mixtures.py",
        "first = self.epoch * count",
        "first = self.epoch * size",
        ["slow/test_mixtures.py"],
    ),
    Fault(
        "filling_has_a_label",
        "foundry/training/batching.py",
        'blank |= {"labels": [IGNORE_INDEX]}',
        'blank |= {"labels": first["labels"][:1]}',
        ["slow/test_batching.py"],
    ),
    # ------------------------------------------------------------ checkpoints
    Fault(
        "published_without_a_manifest",
        "foundry/common/whole_folders.py",
        "    write_manifest(aside)\n    put_in_place(aside, final)",
        "    put_in_place(aside, final)",
        WHOLE,
    ),
    Fault(
        "copied_into_place_not_renamed",
        "foundry/common/whole_folders.py",
        "patiently(partial(source.rename, target), rename_again)",
        "shutil.copytree(source, target), shutil.rmtree(source)",
        WHOLE,
    ),
    Fault(
        "changed_bytes_are_not_seen",
        "foundry/common/whole_folders.py",
        "        if now != digest:",
        "        if len(now) != len(digest):",
        WHOLE,
    ),
    Fault(
        "a_half_deleted_checkpoint_is_visible",
        "foundry/common/whole_folders.py",
        "    move(checkpoint, grave)\n",
        "    shutil.rmtree(checkpoint)\n",
        WHOLE,
    ),
    Fault(
        "the_best_checkpoint_is_deleted",
        "foundry/training/checkpoints.py",
        "if c != newest and (not best or c != Path(best))]",
        "if c != newest]",
        WHOLE,
    ),
    Fault(
        "optimizer_begins_anew",
        "foundry/training/resharding.py",
        'optimizer.load_state_dict({"state": own, "param_groups"',
        'optimizer.load_state_dict({"state": {}, "param_groups"',
        TRAINER,
    ),
    Fault(
        "schedule_begins_anew",
        "foundry/training/optimizers.py",
        "schedule.load_state_dict(schedule.state_dict() | place)",
        "schedule.load_state_dict(schedule.state_dict())",
        TRAINER,
    ),
    Fault(
        "losses_before_the_resume_are_lost",
        "foundry/training/saving.py",
        'self.trainer._tr_loss.fill_(state["running_loss"])',
        "self.trainer._tr_loss.fill_(0.0)",
        WHOLE,
    ),
    Fault(
        "an_owed_evaluation_is_forgotten",
        "foundry/training/saving.py",
        'self.owed_evaluation = state["owed_evaluation"]',
        "self.owed_evaluation = None",
        WHOLE,
    ),
    Fault(
        "a_missing_weight_is_not_seen",
        "foundry/training/saving.py",
        "difference_of_names(names - weights.keys() - model.all_tied_weights_keys.keys(), weights.keys() - known)",
        "difference_of_names(set(), weights.keys() - known)",
        TRAINER,
    ),
    Fault(
        "a_resume_with_another_seed",
        "foundry/training/checkpoints.py",
        "if name in flags and name in now]",
        "if name in flags and name in now and name != 'seed']",
        ["slow/test_checkpoints.py"],
    ),
    # ------------------------------------------------------------ resharding
    Fault(
        "only_this_ranks_part_is_saved",
        "foundry/training/resharding.py",
        "{key: v.full_tensor().cpu() if isinstance(v, DTensor) else v for key, v in state.items()}",
        "{key: v.to_local().cpu() if isinstance(v, DTensor) else v for key, v in state.items()}",
        ["slow/test_launchers.py"],
    ),
    Fault(
        "losses_of_other_ranks_are_added",
        "foundry/training/checkpoints.py",
        """sum(state["running_loss"] for state in states) / len(states)}""",
        """sum(state["running_loss"] for state in states)}""",
        WHOLE,
    ),
    Fault(
        "states_of_other_tensors_are_taken",
        "foundry/training/resharding.py",
        "if wrong := states.keys() ^ names.values():",
        "if wrong := states.keys() - names.values():",
        ["unit/test_resharding.py"],
    ),
    # ------------------------------------------------------------ preferences
    Fault(
        "dpo_sign",
        "features/preferences/losses.py",
        "margins = scores[:, 0] - scores[:, 1]",
        "margins = scores[:, 1] - scores[:, 0]",
        PREFERENCES,
    ),
    Fault(
        "kto_sign",
        "features/preferences/losses.py",
        "torch.sigmoid(self.beta * (2 * desirable - 1) *",
        "torch.sigmoid(self.beta * (1 - 2 * desirable) *",
        PREFERENCES,
    ),
    Fault(
        "no_reference",
        "features/preferences/losses.py",
        "scores = log_probabilities - reference if self.has_reference else log_probabilities",
        "scores = log_probabilities",
        PREFERENCES,
    ),
    Fault(
        "reference_of_other_weights",
        "features/preferences/reference.py",
        """f"{rows._fingerprint} {key}".encode()""",
        """f"{rows._fingerprint}".encode()""",
        PREFERENCES,
    ),
    # ------------------------------------------------------------ distillation
    Fault(
        "temperature_not_squared",
        "features/distillation/divergence.py",
        "return self.temperature**2 * values, self.temperature * (",
        "return self.temperature * values, self.temperature * (",
        DISTILLATION,
    ),
    Fault(
        "divergence_the_other_way_round",
        "features/distillation/divergence.py",
        "return (p * (log_p - log_q)).sum(-1, keepdim=True), -p",
        "return (q * (log_q - log_p)).sum(-1, keepdim=True), -p",
        DISTILLATION,
    ),
    Fault(
        "the_rest_has_all_tokens",
        "features/distillation/divergence.py",
        "log_probs.scatter(1, ids, -torch.inf).logsumexp",
        "log_probs.logsumexp",
        DISTILLATION,
    ),
    # ------------------------------------------------------------ rewards
    Fault(
        "baseline_with_the_answer_itself",
        "features/rewards/methods.py",
        "return centred * self.samples / (self.samples - 1)",
        "return centred",
        REWARDS,
    ),
    Fault(
        "baseline_without_the_greedy_answer",
        "features/rewards/methods.py",
        "return rewards - greedy[:, None]",
        "return rewards - rewards.mean(1, keepdim=True)",
        REWARDS,
    ),
    Fault(
        "clip_takes_the_larger",
        "features/rewards/methods.py",
        "gains = torch.minimum(ratios * advantages,",
        "gains = torch.maximum(ratios * advantages,",
        REWARDS,
    ),
    Fault(
        "distance_the_other_way_round",
        "features/rewards/methods.py",
        "((reference - log_p).exp() - (reference - log_p) - 1)",
        "((log_p - reference).exp() - (log_p - reference) - 1)",
        REWARDS,
    ),
    # ------------------------------------------------------------ metrics
    Fault(
        "f1_of_answers_without_a_label",
        "tasks/metrics/general.py",
        "np.where(predictions < 0, 1 - references, predictions)",
        "np.where(predictions < 0, references, predictions)",
        METRICS,
    ),
    Fault(
        "matthews_of_answers_without_a_label",
        "tasks/metrics/general.py",
        "return matthews_corrcoef(references, predictions)",
        "return matthews_corrcoef(references, np.maximum(predictions, 0))",
        METRICS,
    ),
    Fault(
        "answers_in_capitals_are_others",
        "tasks/metrics/answers.py",
        "text.lower().translate(_NO_PUNCTUATION)",
        "text.translate(_NO_PUNCTUATION)",
        METRICS,
    ),
    Fault(
        "the_first_reference_alone",
        "tasks/metrics/general.py",
        "max(score(answer, text) for text in texts)",
        "score(answer, texts[0])",
        METRICS,
    ),
    Fault(
        "nats_for_bits",
        "foundry/objectives/metrics.py",
        "float(nats / math.log(2) / (text_tokens * bytes_per_token))",
        "float(nats / (text_tokens * bytes_per_token))",
        TRAINER,
    ),
    Fault(
        "an_undefined_metric_is_the_best",
        "tasks/metrics/scoring.py",
        "scores[key] = math.inf if is_greater_better(key) is False else 0.0",
        "scores[key] = 0.0",
        METRICS,
    ),
    # ------------------------------------------------------------ caches
    Fault(
        "tokens_for_another_eos_flag",
        "foundry/corpora/token_files.py",
        "tokenizer_fingerprint(tokenizer), args.eos_between_documents]",
        "tokenizer_fingerprint(tokenizer)]",
        DATA,
    ),
    Fault(
        "tokens_of_another_number_of_documents",
        "foundry/corpora/token_files.py",
        "    choices += [args.max_train_samples]\n",
        "",
        DATA,
    ),
    Fault(
        "rows_for_another_prefix",
        "tasks/tasks.py",
        'fields = ("prefix", "inputs", "target",',
        'fields = ("inputs", "target",',
        ["unit/test_examples.py"],
    ),
    # ------------------------------------------------------------ messages, flags
    Fault(
        "a_users_mistake_ends_with_1",
        "foundry/common/command_line.py",
        "raise SystemExit(2 if is_of_user else 1) from None",
        "raise SystemExit(1) from None",
        ["unit/test_arguments_t5.py", "unit/test_first_contact.py"],
    ),
    Fault(
        "left_over_words_are_taken",
        "foundry/common/command_line.py",
        "    if left_over:\n",
        '    if left_over and left_over[0].startswith("-"):\n',
        ["unit/test_arguments_t5.py", "unit/test_first_contact.py"],
    ),
    Fault(
        "limits_of_lists_are_not_checked",
        "foundry/common/flags.py",
        "for item in value if isinstance(value, list) else [] if value is None else [value]:",
        "for item in [] if isinstance(value, list) or value is None else [value]:",
        ["unit/test_arguments_t5.py", "unit/test_own_pairs.py", "unit/test_bad_values.py"],
    ),
    Fault(
        "a_flag_may_be_set_twice",
        "foundry/common/command_line.py",
        "        if given.count(name) > 1:",
        "        if given.count(name) > 2:",
        ["unit/test_arguments_t5.py"],
    ),
    Fault(
        "a_secret_is_recorded",
        "foundry/common/secrets.py",
        "        hide = secret and not equals\n",
        "        hide = False\n",
        ["unit/test_arguments_t5.py", "slow/test_secrets.py"],
    ),
    # ------------------------------------------------------------ schedules, optimizers
    Fault(
        "warm_up_begins_a_step_early",
        "foundry/training/optimizers.py",
        "return warmup_start + (1.0 - warmup_start) * step / warmup",
        "return warmup_start + (1.0 - warmup_start) * (step + 1) / warmup",
        OPTIMIZERS,
    ),
    Fault(
        "inverse_sqrt_rises_before_its_warm_up",
        "foundry/training/optimizers.py",
        "return math.sqrt(warmup / max(step, warmup))",
        "return math.sqrt(warmup / max(step, 1))",
        OPTIMIZERS,
    ),
    Fault(
        "schedule_ends_at_zero",
        "foundry/training/optimizers.py",
        "return floor + (1.0 - floor) * shape",
        "return shape",
        OPTIMIZERS,
    ),
    Fault(
        "muon_by_the_smaller_side",
        "foundry/training/optimizers.py",
        "0.2 * max(p.shape) ** 0.5",
        "0.2 * min(p.shape) ** 0.5",
        OPTIMIZERS,
    ),
    Fault(
        "steps_are_not_scaled_by_the_tensor",
        "foundry/training/optimizers.py",
        "[p.numel() ** -0.5 for p in params]",
        "[p.shape[0] ** -0.5 for p in params]",
        OPTIMIZERS,
    ),
    Fault(
        "adafactor_without_the_tensors_scale",
        "foundry/training/optimizers.py",
        "scale_parameter=True, relative_step=False",
        "scale_parameter=False, relative_step=False",
        OPTIMIZERS,
    ),
    # ------------------------------------------------------------ LoRA
    Fault(
        "matrices_are_dropped_not_merged",
        "features/lora/low_rank.py",
        "whole = tuned.merge_and_unload()",
        "whole = tuned.unload()",
        ["features/lora/test_low_rank.py"],
    ),
    Fault(
        "matrices_for_other_base_weights",
        "features/lora/low_rank.py",
        "if not math.isclose(found, expected, rel_tol=1e-5):",
        "if not math.isclose(found, expected, rel_tol=1.0):",
        ["features/lora/test_low_rank.py"],
    ),
    # ------------------------------------------------------------ answers
    Fault(
        "answers_one_token_short",
        "foundry/modeling/generation_settings.py",
        "model.generation_config.max_length = tokens + 1",
        "model.generation_config.max_length = tokens",
        ["unit/test_model_t5.py"],
    ),
    Fault(
        "rules_of_the_task_before",
        "foundry/modeling/generation_settings.py",
        '"num_return_sequences", *TOKEN_RULES)',
        '"num_return_sequences")',
        ["unit/test_model_t5.py"],
    ),
    Fault(
        "predictions_in_the_order_of_lengths",
        "foundry/training/row_order.py",
        "places = np.argsort(_evaluation_order(dataloader.dataset))",
        "places = np.array(_evaluation_order(dataloader.dataset))",
        ["slow/test_batching.py"],
    ),
    Fault(
        "half_an_answer_is_kept",
        "tasks/predictions.py",
        'kept = content[: content.rfind(b"\\n") + 1]',
        "kept = content",
        ["unit/test_predict_t5.py"],
    ),
    Fault(
        "a_difference_of_nan_is_small",
        "foundry/publishing/exports.py",
        "    if not largest <= tolerance:",
        "    if largest > tolerance:",
        EXPORTS,
    ),
    Fault(
        "other_tokens_are_near_ties",
        "foundry/publishing/exports.py",
        "        if not gap <= 2 * tolerance:",
        "        if gap == np.inf:",
        EXPORTS,
    ),
]


def run_tests(copy: Path, files: list[str]) -> tuple[int, str]:
    """(pytest's exit code, what it printed) of these test files in the copy, all of them where the list is empty."""
    words = [f"tests/{name}" for name in files]
    # There the planted text stands in place of the old one.
    words = words or ["--deselect", "tests/unit/test_planted_faults.py"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *words]
    ended = subprocess.run(command, cwd=copy, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return ended.returncode, ended.stdout + ended.stderr


def failed_test(printed: str) -> str:
    """The name of the test that failed, from pytest's output: its last "FAILED tests/..." or "ERROR tests/..."."""
    lines = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[-1].split()[1].removeprefix("tests/") if lines else "without a test's name"


def copy_of_checkout(folder: Path) -> Path:
    """A clone in the folder, with the files as they are now."""
    copy = folder / "checkout"
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(copy)], check=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        else:
            (copy / name).unlink(missing_ok=True)
    return copy


def verdict(fault: Fault, copy: Path, whole_suite: bool) -> str:
    """What became of a fault: "caught ...", "NOT caught" or "does not apply ...". The copy is as before afterwards."""
    if (count := fault.places(copy)) != 1:
        return f"does not apply: the old text stands {count} times in {fault.file}"
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    began = time.monotonic()
    code, printed = run_tests(copy, [] if whole_suite else fault.tests)
    path.write_text(text, encoding="utf-8")
    took = f"after {time.monotonic() - began:.0f} s"
    if code == 1 and "Interrupted" not in printed:
        return f"caught {took} by {failed_test(printed)}"
    return f"NOT caught {took} by {' '.join(fault.tests)}" + (f" (pytest: exit code {code})" if code else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests, and run nothing")
    parser.add_argument("--whole_suite", action="store_true", help="run all tests for each fault, for hours")
    args = parser.parse_args(argv)
    if unknown := set(args.only or ()) - {fault.name for fault in FAULTS}:
        parser.error(f"--only {min(unknown)}: no such fault; --list shows them")
    faults = [fault for fault in FAULTS if not args.only or fault.name in args.only]
    if args.list:
        for fault in faults:
            print(f"{fault.name}: {fault.file}, for {' '.join(fault.tests)}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_checkout(Path(folder))
        code, printed = run_tests(copy, [] if args.whole_suite else sorted({name for f in faults for name in f.tests}))
        if code:
            print(f"without a fault, this fails already: {failed_test(printed)}\n{printed[-2000:]}")
            return 1
        left = []
        for fault in faults:
            said = verdict(fault, copy, args.whole_suite)
            print(f"{fault.name}: {said}", flush=True)
            left += [] if said.startswith("caught") else [fault.name]
    print(f"{len(faults) - len(left)} of {len(faults)} caught" + (f"; not: {' '.join(left)}" if left else ""))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
