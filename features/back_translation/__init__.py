r"""Text from one side only: a trained model writes the other side, and pairs are made of both.

    python -m features.back_translation.back_translate --text_file news.en --model_name_or_path out/en_de \
        --output_file made.jsonl --source_column de --target_column en

back_translate.py has predict_t5.py answer the text, filters what it wrote, and mixes it with real pairs.
"""
