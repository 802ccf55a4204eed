"""The encoder alone, for transformers and for sentence-transformers.

    python export_checkpoint.py --model_name_or_path out/fine_tune_t5 --formats encoder sentence_transformers

encoder.py writes and compares it.
"""
