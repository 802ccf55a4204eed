"""A worked example of ready-made ids: made-up time series, quantised to 64 levels, as an .npy file.

    python -m corpora.example_series out/series.npy
    python pre_train_t5.py recipes/pre_train_own_ids.yaml

Each row of the array is a series of 512 steps: two sines of random period, phase and height, and noise. A level is the
number of quantiles of all values that lie below, so all levels are equally frequent: a model that has learnt nothing
needs ln 64 = 4.16 nats for an id, and whatever is below that it took from the other steps.
"""

import argparse
from pathlib import Path

import numpy as np

LEVELS = 64
SERIES, STEPS = 2_000, 512
NOISE = 0.05  # standard deviation; the sines' amplitudes lie between 0.5 and 1


def make_series(count: int = SERIES, steps: int = STEPS, seed: int = 0) -> np.ndarray:
    """uint8 [count, steps], values 0 to 63; the same for the same seed."""
    generator = np.random.default_rng(seed)
    periods = np.exp(generator.uniform(np.log(8), np.log(100), (2, count, 1)))
    phases = generator.uniform(0, 2 * np.pi, (2, count, 1))
    heights = generator.uniform(0.5, 1, (2, count, 1))
    values = (heights * np.sin(2 * np.pi * np.arange(steps) / periods + phases)).sum(axis=0)
    values += NOISE * generator.standard_normal(values.shape)
    return np.searchsorted(np.quantile(values, np.arange(1, LEVELS) / LEVELS), values).astype(np.uint8)


def main(argv: list[str] | None = None) -> None:
    """Writes the array."""
    parser = argparse.ArgumentParser(prog="python -m corpora.example_series", description="Writes an example of ids.")
    parser.add_argument("path", type=Path, help="The .npy file to write, such as out/series.npy.")
    path = parser.parse_args(argv).path.with_suffix(".npy")
    path.parent.mkdir(parents=True, exist_ok=True)
    series = make_series()
    np.save(path, series)
    print(f"{path}: {len(series):,} series of {series.shape[1]} steps, values 0 to {LEVELS - 1}")


if __name__ == "__main__":
    main()
