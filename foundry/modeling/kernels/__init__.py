"""Attention kernels: the library's chosen and checked, and the gradient of T5's relative bias."""
