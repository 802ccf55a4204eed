"""Where this project reaches into libraries, with the reason: what may break when one is upgraded.

`test_structure.py` compares OVERRIDES and INSIDES with the sources. Tested with transformers 5.23, torch 2.13,
accelerate 1.15 and Python 3.11. A method that Python documents despite its underscore (`os._exit`, a named tuple's
`_replace`) does not count.
"""

# Methods of Trainer that T5Trainer overrides, where no callback, data set or argument can do the same.
OVERRIDES = [
    # the data workers are forked once, before the first step (a fork beside threads that enter Python can hang), and
    # survive the signals that stop a run; signal handlers are restored
    "train",
    # a finished run that is resumed does not train further; one that is resumed with another batch goes on at its next
    # row, where Trainer counts steps of the new size; a stopped run exits with code 75
    "_run_epoch",
    # batches of the data workers, copied without waiting, and counted for throughput and MFU; a feature's callback may
    # say by what the loss is divided
    "get_batch_samples",
    # keeps a batch's fractions (log-probabilities, rewards, counts) in float32 where DeepSpeed computes in bfloat16
    "_prepare_input",
    # a non-finite gradient ends the run before it reaches the weights
    "_get_grad_norm",
    # T5's schedules
    "create_scheduler",
    # the best model is loaded as any checkpoint is; no checkpoint is deleted that a stop has just saved
    "_finalize_training",
    # the best model is always a saved one; a stopped run saves, also with --save_strategy best; a missing metric gives
    # a one-line error
    "_determine_best_metric",
    # a checkpoint appears only when it is whole; a full disk costs a checkpoint, not the run; one optimizer.pt of whole
    # tensors by name, from which a run of any sharding resumes
    "_save_checkpoint",
    # saves the shared embedding once, float32 weights also where DeepSpeed computes with bfloat16 ones, and task.json
    # with every model
    "_save",
    # loads that optimizer.pt, also with DeepSpeed
    "_prepare_for_training",
    # whole weights into any sharding, or what a feature trains beside them; a checkpoint that lacks tensors ends the
    # run, where Trainer warns; a shared embedding does not count as missing
    "_load_from_checkpoint",
    # the same order of rows for any number of ranks and workers, training has its own collators, and a stream its own
    # loader; in evaluations rows of similar length in a batch
    "_get_dataloader",
    # scores each task by its own rule
    "evaluate",
    # predictions in the order of the rows, each row once on several ranks; answers are found with the present weights
    "evaluation_loop",
    # returns statistics of teacher forcing instead of logits
    "prediction_step",
]

# (files, private names of a library that they use, the library's part).
INSIDES = [
    # a flag that takes JSON is read as transformers reads it; until transformers lists these flags publicly
    (["foundry/arguments/training"], ["_VALID_DICT_FIELDS"], "of TrainingArguments"),
    # a step of shapes without numbers, whose memory is counted; until torch offers fake tensors publicly
    (["foundry/modeling/recomputed"], ["_subclasses"], "of torch"),
    (["foundry/runs/counted"], ["_subclasses", "_python_dispatch", "_pytree", "_local_scalar_dense"], "of torch"),
    # one process uses one GPU, not DataParallel; until transformers drops DataParallel
    (["foundry/arguments/training"], ["_n_gpu"], "of TrainingArguments"),
    # a field becomes a flag as in every script of transformers; until transformers offers this step publicly
    (["foundry/common/command_line"], ["_parse_dataclass_field"], "of HfArgumentParser"),
    # -1,0,1 is a value, not a flag; until argparse takes what follows a flag that needs a value as its value
    (["foundry/common/command_line"], ["_negative_number_matcher"], "of argparse"),
    # near matches for a wrong flag, of all spellings; until argparse tells the options that it knows
    (["foundry/common/command_line"], ["_option_string_actions"], "of argparse"),
    # --help shows one spelling of a flag; until argparse can hide an alias
    (["foundry/common/help"], ["_format_action_invocation"], "of argparse"),
    # names the lock for which torch waits silently; until torch ends or reports that wait
    (["foundry/common/machine"], ["_get_build_directory"], "of torch"),
    # several ranks end with their exit code although threads of their libraries still run; until no library leaves such
    # threads
    (["foundry/common/machine"], ["_run_exitfuncs"], "of atexit"),
    # asks whether a repository has a file; the public way raises for a missing file as for a broken connection; until
    # cached_file tells them apart
    (["foundry/corpora/tokenizers"], ["_raise_exceptions_for_missing_entries"], "of transformers' `cached_file`"),
    # its length and that of its file tell whether the file was cut, which would end the process; until numpy raises for
    # it
    (["foundry/corpora/token_files"], ["_mmap"], "of numpy's memmap"),
    # a damaged archive is refused, not cut short; until Python raises for what follows an archive
    (["foundry/corpora/files"], ["_buffer", "_trailing_error"], "of BZ2File and LZMAFile"),
    # T5Gemma 2 is saved under the names with which Trainer resumes it, a wrapped checkpoint under the names of a plain
    # one; until transformers 5.17 is no longer supported and a resume needs no renaming
    (["features/gemma/t5gemma", "foundry/modeling/loading"], ["_weight_conversions"], "of a model"),
    # another forward pass; weights, names and hooks stay as they are; until transformers lets a model's loss, and T5's
    # bias, be replaced; model.loss_function still needs all logits
    (
        [
            "features/lora/frozen",
            "foundry/modeling/layers",
            "foundry/modeling/loss",
            "foundry/modeling/products",
            "foundry/modeling/recomputed",
        ],
        ["__class__"],
        "of a model or a layer",
    ),
    # removes files that a killed run left empty; until torch ignores damaged files
    (["foundry/modeling/loss"], ["_inductor"], "of torch: folder and locks of the compiler's cache"),
    # memory in segments that grow, chosen after torch has started; until the call is public; today it is the one that
    # torch's own warning names
    (["foundry/runs/speed"], ["_C", "_accelerator_setAllocatorSettings"], "of torch"),
    # which attention the model uses, or asks for; transformers can only set it publicly; until transformers has a
    # public getter
    (
        [
            "foundry/runs/counted",
            "foundry/runs/speed",
            "foundry/modeling/segment_masks",
            "foundry/modeling/loading",
            "foundry/modeling/recomputed",
            "features/onnx/encoder_graph",
        ],
        ["_attn_implementation"],
        "of a configuration",
    ),
    # the attention layers of a model take another implementation than its stacks, whose masks stay; until transformers
    # sets it for a layer
    (["foundry/modeling/recomputed"], ["_attn_implementation_internal"], "of a configuration"),
    # the softmax's gradient in one kernel, from its output alone; torch has no public name for it
    (["foundry/modeling/recomputed"], ["_softmax_backward_data"], "of torch"),
    # whether a tensor was changed since it was cast; torch has no public name for it
    (["foundry/modeling/recomputed"], ["_version"], "of a tensor"),
    # whether something else gathers or changes a layer's weights, as ZeRO-3 does; torch has no public question
    (["foundry/modeling/recomputed"], ["_forward_pre_hooks", "_forward_hooks"], "of a layer"),
    # whether bfloat16 is quick on this CPU; until torch 2.13 is the oldest that we support: torch.cpu.get_capabilities
    (["foundry/common/machine"], ["_is_amx_tile_supported", "_is_avx512_bf16_supported"], "of torch.cpu"),
    # a second train() makes a new schedule; until create_scheduler becomes a hook that returns a schedule
    (["foundry/trainer_t5"], ["_created_lr_scheduler"], "of Trainer"),
    # generation options given to evaluate() and predict(); until Trainer passes them to prediction_step
    (["foundry/training/evaluation"], ["_gen_kwargs"], "of Trainer"),
    # FSDP finds the layers of T5Gemma 2 without its image encoder; until accelerate skips names of layers that a model
    # lacks
    (["features/gemma/t5gemma"], ["_no_split_modules"], "of a model"),
    # moves a batch to the device; Trainer's own subclasses call it too; until it is renamed
    (["foundry/trainer_t5", "features/encoder_heads/head_trainer"], ["_prepare_inputs"], "of Trainer"),
    # a resumed run logs the same losses as an uninterrupted one; until Trainer saves them in its state
    (["foundry/trainer_t5", "foundry/training/saving"], ["_total_loss_scalar"], "of Trainer"),
    # the same; and the loss of a step with a non-finite gradient is taken back; until the same
    (["foundry/trainer_t5", "foundry/training/saving", "foundry/training/broken_steps"], ["_tr_loss"], "of Trainer"),
    # a run that goes on within an epoch, in batches of another size, has the random numbers of the checkpoint after its
    # loader drew one; until Trainer counts rows, not steps
    (["foundry/trainer_t5"], ["_load_rng_state"], "of Trainer"),
    # an evaluation that a stopped run had to leave out is made by the run that resumes; until Trainer offers the step's
    # end by itself
    (["foundry/trainer_t5"], ["_maybe_log_save_evaluate"], "of Trainer"),
    # model and random numbers in a checkpoint that we write ourselves; until Trainer offers this publicly
    (["foundry/training/saving"], ["_internal_call", "_save_rng_state"], "of Trainer"),
    # the same losses; until the same
    (["foundry/training/saving"], ["_globalstep_last_logged"], "of Trainer"),
    # answers of our own loop follow the settings of generate by its own processors; until they are public
    (
        ["foundry/modeling/decoding"],
        ["_prepare_generation_config", "_prepare_special_tokens", "_get_logits_processor"],
        "of a model",
    ),
    # products in float32 take 0.3 to 0.6 times the time of F.linear on a CPU of AMD; until F.linear takes oneDNN there
    (
        ["foundry/modeling/onednn"],
        ["_linear_pointwise", "_is_mkldnn_bf16_supported"],
        "of torch.ops.mkldnn: a product by oneDNN, and whether it has one of bfloat16",
    ),
    (["foundry/modeling/decoding_layers"], ["_reorder_linear_weight"], "of torch.ops.mkldnn: a matrix packed for it"),
    # answers in int8; until torch names its products of whole numbers, and packs matrices, publicly
    (
        ["foundry/modeling/int8"],
        ["_int_mm", "_make_per_channel_quantized_tensor", "__class__"],
        "of torch; a linear layer becomes one of int8 in place",
    ),
    # one kernel for many tensors, as torch's own optimizers use them; until torch offers them publicly, or
    # torch.optim.AdamW takes a rate for each tensor
    (
        ["foundry/training/optimizers"],
        [
            "_foreach_addcmul_",
            "_foreach_clamp_min_",
            "_foreach_lerp",
            "_foreach_lerp_",
            "_foreach_mul_",
            "_foreach_norm",
            "_foreach_sub_",
            "_fused_adamw_",
        ],
        "of torch",
    ),
    # the first log after a resume shows the rate of the flags; until step() of a schedule can be repeated without being
    # counted
    (["foundry/training/optimizers"], ["_last_lr"], "of a torch schedule"),
    # a worker without shared memory ends the run, which would wait for ever; until Python reports the error to the
    # reader of the queue
    (["foundry/training/row_order"], ["_on_queue_feeder_error"], "of multiprocessing"),
    # says in which function a rank waits; until Python can tell another thread's place otherwise
    (["foundry/training/preemption"], ["_current_frames"], "of sys"),
    # ZeRO makes its states in the first step only, and links those of its first group alone; until
    # safe_set_full_optimizer_state of DeepSpeed makes and finds the states of every group
    (
        ["foundry/training/resharding"],
        [
            "_lazy_init_hp_params_optimizer_state",
            "_hp_optimizer_states_linked",
            "_set_fp32_optimizer_param_groups",
            "_clear_fp32_optimizer_param_groups",
            "_hp_mapping",
        ],
        "of DeepSpeed's ZeRO optimizers;  of their weights",
    ),
    # ends workers that live through all epochs and ignore signals; until DataLoader has a method that closes it
    (["foundry/training/row_order"], ["_iterator", "_shutdown_workers"], "of DataLoader"),
]

# What no test of names finds: formats of files, words of errors, and names that a library and we both give; and the
# tests that show a change.
READ_ELSEWHERE = [
    # words of torch's errors for a full disk: a full disk costs a checkpoint, not the run
    (["foundry/common/whole_folders.py"], ["test_safe_checkpoints.py"]),
    # tokenizer.json of tokenizers, spiece.model of sentencepiece: a tokenizer as the older and the newer library read
    # it
    (["foundry/corpora/sentencepiece_models.py"], ["test_tokenizer_model.py"]),
    # words of sentencepiece's errors: says which size of vocabulary is possible
    (["foundry/corpora/tokenizers.py"], ["test_create_tokenizer.py"]),
    # words of the error of datasets about loading scripts: says what to give instead
    (["foundry/corpora/hub.py"], ["test_hub.py"]),
    # words of torch's error about unsafe pickles: names the function that a checkpoint would call
    (["foundry/training/checkpoints.py"], ["test_safe_checkpoints.py"]),
    # names of files in a checkpoint: whole and damaged checkpoints are told apart; all ranks outlive a full disk
    (
        ["foundry/training/saving.py", "foundry/training/checkpoints.py"],
        ["test_checkpoints.py", "test_safe_checkpoints.py"],
    ),
    # _fingerprint of a table of datasets, and of our own mixtures under the same name: the fingerprint of a task's rows
    # is that of their contents
    (["tasks/"], ["test_mixtures.py", "test_task_records.py"]),
    # tokenizer.json of tokenizers: scores, map of letters, what is added to a text: llama.cpp reads a text as we do
    (["features/gguf/writing.py"], ["test_gguf.py"]),
    # load_model, load_tokenizer of CTranslate2's converter; its file of tokens: v1.1's output is scaled rightly; every
    # token has one id
    (["features/ctranslate2/engine.py"], ["test_ctranslate2_export.py"]),
    # CTranslate2's two converters, and names of fields of its specification: what they leave out of a configuration:
    # caps, scales, positions
    (["features/ctranslate2/gemma_converter.py"], ["test_ctranslate2_gemma.py"]),
]
