"""Reads checkpoints in one GGUF file, as llama.cpp writes them, as the Hugging Face checkpoints that they were made from.

A file's metadata becomes the `config.json` of a family of models (`architectures`), and its tensors become that family's, under
Hugging Face names (`tensors`), so that the modules of families know nothing of GGUF.
"""
