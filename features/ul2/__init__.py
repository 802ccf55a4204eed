"""Mixtures of denoisers: UL2, prefix LM and every other entry of OBJECTIVES in constants.py but span corruption.

    python pre_train_t5.py --train_file my_text.txt --objective ul2

denoisers.py has their rows, masks and modes. They are rows of several examples: foundry/objectives/packed_rows.py.
"""
