"""Separate documents in full rows: each one is corrupted by itself, and none attends to another.

    python pre_train_t5.py --train_file my_text.txt --packing documents

document_spans.py has their rule, their index and masks. foundry/objectives/packed_rows.py makes the tensors.
"""
