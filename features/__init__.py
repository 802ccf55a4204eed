"""What not every training needs, one folder each: this page is the table of contents.

The core and the scripts read these tables; nothing searches the folders. An entry names its object as "module:name",
and who needs it imports it then (`resolve`, foundry/common/by_name.py): the module may need torch, or a library that is
not installed, and this page is read at every start, also for --help.
"""

# ---------------------------------------------------------------- flags: the dataclasses that each script adds
FEATURES: dict[str, tuple[str, ...]] = {  # `Feature`
    "pre_train_t5": (
        "features.distillation:Distillation",
        "features.hub:RunHub",
        "features.lora:LowRank",
        "features.moving_average:MovingAverage",
        "features.streams:Streams",
    ),
    "fine_tune_t5": (
        "features.distillation:TaskDistillation",
        "features.encoder_heads:Heads",
        "features.hub:RunHub",
        "features.lora:LowRank",
        "features.moving_average:MovingAverage",
        "features.preferences:Preferences",
        "features.rewards:Rewards",
        "features.streams:TaskStreams",
    ),
    "evaluate_t5": (
        "features.lora:HeldToAnswer",
        "features.streams:EvaluatedStreams",
        "features.win_rates:WinRates",
    ),
    "predict_t5": (
        "features.engines:Engines",
        "features.lora:HeldToAnswer",
        "features.prompt:Prompt",
        "features.rerank:Rerank",
        "features.server:Server",
        "features.web_page:WebPage",
    ),
    "export_checkpoint": (
        "features.averages:Averages",
        "features.encoder_heads:Exported",
        "features.engines:Formats",
        "features.hub:ExportHub",
    ),
    "create_tokenizer": ("features.streams:StreamedDataSet",),
}
# `TaskFeature`: those that add fields to the entries of tasks, and so flags to all scripts that know tasks
TASK_FEATURES = ("features.preferences:ComparedAnswers", "features.rewards:RewardedTask")

# ---------------------------------------------------------------- objectives of pre-training: `Objective`
DENOISER_MIXTURE = "features.ul2.denoisers:DenoiserMixture"  # all entries of OBJECTIVES (constants.py) but one
PACKINGS = {"documents": "features.documents.document_spans:DocumentSpans"}  # by value of --packing

# ---------------------------------------------------------------- models
MORE_FAMILIES = {  # `Family`, by model_type
    "t5gemma": "features.gemma.t5gemma:T5GEMMA",
    "t5gemma2": "features.gemma.t5gemma:T5GEMMA_2",
}
ADAPTERS = ("features.lora.low_rank:LowRankFolder",)  # `Adapter`: folders of what was trained beside a checkpoint

# ---------------------------------------------------------------- formats of exports, engines that answer
FORMATS = {  # `Format`, by value of --formats
    "ctranslate2": "features.ctranslate2.engine:FORMAT",
    "ctranslate2_int8": "features.ctranslate2.engine:FORMAT",
    "ctranslate2_encoder": "features.ctranslate2.encoder_writing:FORMAT",
    "encoder": "features.encoder.encoder:FORMAT",
    "sentence_transformers": "features.encoder.encoder:FORMAT",
    "gguf": "features.gguf.llama_engine:FORMAT",
    "gguf_q8_0": "features.gguf.llama_engine:FORMAT",
    "gguf_encoder": "features.gguf.llama_engine:FORMAT",
    "onnx": "features.onnx.whole_graph:FORMAT",
    "onnx_encoder": "features.onnx.encoder_graph:FORMAT",
}
BACKENDS = {  # `Backend`, by value of --backend
    "ctranslate2": "features.ctranslate2.engine:BACKEND",
    "gguf": "features.gguf.llama_engine:BACKEND",
}

# ---------------------------------------------------------------- folders whose models write no text
ANSWERING = {  # `FolderAnswers`, by a field of task.json, or a file of the folder
    "head": "features.encoder_heads.head_answers:HeadAnswers",
    "embedding": "features.encoder_heads.embedding_answers:EmbeddingAnswers",
    "modules.json": "features.encoder_heads.sentence_answers:SentenceAnswers",
}
