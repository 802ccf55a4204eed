"""What not every training needs, one folder each: this page is the table of contents.

The core and the scripts read these tables; nothing searches the folders. Each entry is a function, because what it
imports may need torch or a library that is not installed, and this page is read at every start, also for --help.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foundry.features import Feature, TaskFeature
    from foundry.modeling.families import Family
    from foundry.modeling.weights import Adapter
    from foundry.objectives.objective import Objective
    from foundry.publishing.exports import Format
    from tasks.answering import Backend
    from tasks.model_folders import FolderAnswers


# ---------------------------------------------------------------- flags of the scripts: the dataclasses that each adds
def of_pre_training() -> "list[type[Feature]]":
    from features.distillation import Distillation
    from features.hub import RunHub
    from features.lora import LowRank
    from features.moving_average import MovingAverage
    from features.streams import Streams

    return [Distillation, RunHub, LowRank, MovingAverage, Streams]


def of_fine_tuning() -> "list[type[Feature]]":
    from features.distillation import TaskDistillation
    from features.encoder_heads import Heads
    from features.hub import RunHub
    from features.lora import LowRank
    from features.moving_average import MovingAverage
    from features.preferences import Preferences
    from features.rewards import Rewards
    from features.streams import TaskStreams

    first = [TaskDistillation, Heads, RunHub, LowRank]
    return [*first, MovingAverage, Preferences, Rewards, TaskStreams]


def of_evaluation() -> "list[type[Feature]]":
    from features.lora import HeldToAnswer
    from features.streams import EvaluatedStreams
    from features.win_rates import WinRates

    return [HeldToAnswer, EvaluatedStreams, WinRates]


def of_prediction() -> "list[type[Feature]]":
    from features.engines import Engines
    from features.lora import HeldToAnswer
    from features.prompt import Prompt
    from features.rerank import Rerank
    from features.server import Server
    from features.web_page import WebPage

    return [Engines, HeldToAnswer, Prompt, Rerank, Server, WebPage]


def of_export() -> "list[type[Feature]]":
    from features.averages import Averages
    from features.encoder_heads import Exported
    from features.engines import Formats
    from features.hub import ExportHub

    return [Averages, Exported, Formats, ExportHub]


def of_tokenizers() -> "list[type[Feature]]":
    from features.streams import StreamedDataSet

    return [StreamedDataSet]


def task_features() -> "list[type[TaskFeature]]":
    """Those that add fields to the entries of tasks, and so flags to all scripts that know tasks."""
    from features.preferences import ComparedAnswers
    from features.rewards import RewardedTask

    return [ComparedAnswers, RewardedTask]


# ---------------------------------------------------------------- objectives of pre-training
def denoiser_mixture() -> "type[Objective]":
    """All entries of OBJECTIVES (constants.py) but span corruption."""
    from features.ul2.denoisers import DenoiserMixture

    return DenoiserMixture


def _documents() -> "type[Objective]":
    from features.documents.document_spans import DocumentSpans

    return DocumentSpans


PACKINGS: "dict[str, Callable[[], type[Objective]]]" = {"documents": _documents}  # by value of --packing


# ---------------------------------------------------------------- models
def _t5gemma() -> "Family":
    from features.gemma.t5gemma import T5GEMMA

    return T5GEMMA


def _t5gemma2() -> "Family":
    from features.gemma.t5gemma import T5GEMMA_2

    return T5GEMMA_2


def _low_rank_folder() -> "Adapter":
    from features.lora.low_rank import LowRankFolder

    return LowRankFolder()


MORE_FAMILIES: "dict[str, Callable[[], Family]]" = {"t5gemma": _t5gemma, "t5gemma2": _t5gemma2}  # by model_type
ADAPTERS: "list[Callable[[], Adapter]]" = [_low_rank_folder]  # folders of what was trained beside a checkpoint


# ---------------------------------------------------------------- formats of export_checkpoint.py
def _ctranslate2_format() -> "Format":
    from features.ctranslate2.engine import FORMAT

    return FORMAT


def _ctranslate2_encoder_format() -> "Format":
    from features.ctranslate2.encoder_writing import FORMAT

    return FORMAT


def _encoder_format() -> "Format":
    from features.encoder.encoder import FORMAT

    return FORMAT


def _gguf_format() -> "Format":
    from features.gguf.llama_engine import FORMAT

    return FORMAT


def _onnx_format() -> "Format":
    from features.onnx.whole_graph import FORMAT

    return FORMAT


def _onnx_encoder_format() -> "Format":
    from features.onnx.encoder_graph import FORMAT

    return FORMAT


FORMATS: "dict[str, Callable[[], Format]]" = {  # by value of --formats
    "ctranslate2": _ctranslate2_format,
    "ctranslate2_int8": _ctranslate2_format,
    "ctranslate2_encoder": _ctranslate2_encoder_format,
    "encoder": _encoder_format,
    "sentence_transformers": _encoder_format,
    "gguf": _gguf_format,
    "gguf_q8_0": _gguf_format,
    "gguf_encoder": _gguf_format,
    "onnx": _onnx_format,
    "onnx_encoder": _onnx_encoder_format,
}


# ---------------------------------------------------------------- engines of predict_t5.py
def _ctranslate2_backend() -> "Backend":
    from features.ctranslate2.engine import BACKEND

    return BACKEND


def _gguf_backend() -> "Backend":
    from features.gguf.llama_engine import BACKEND

    return BACKEND


BACKENDS: "dict[str, Callable[[], Backend]]" = {"ctranslate2": _ctranslate2_backend, "gguf": _gguf_backend}


# ---------------------------------------------------------------- folders whose models write no text
def _head_answers() -> "FolderAnswers":
    from features.encoder_heads.head_answers import HeadAnswers

    return HeadAnswers()


def _embedding_answers() -> "FolderAnswers":
    from features.encoder_heads.embedding_answers import EmbeddingAnswers

    return EmbeddingAnswers()


def _sentence_answers() -> "FolderAnswers":
    from features.encoder_heads.sentence_answers import SentenceAnswers

    return SentenceAnswers()


ANSWERING: "dict[str, Callable[[], FolderAnswers]]" = {  # by a field of task.json, or a file of the folder
    "head": _head_answers,
    "embedding": _embedding_answers,
    "modules.json": _sentence_answers,
}
