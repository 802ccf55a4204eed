r"""More pairs of few: the beginning of one pair and the end of another.

    python -m features.recombination.recombine_pairs --train_file words.tsv --source_column 0 --target_column 1 \
        --rows 8000 --output_file more.tsv

For targets that follow their sources letter by letter, such as pronunciations.
"""
