"""Checkpoints in one GGUF file, as llama.cpp writes them: read as the Hugging Face checkpoint that they were made from.

A file's metadata becomes the `config.json` of a family (`architectures`), and its tensors the family's, under their names
(`tensors`), so that families know nothing of GGUF.
"""
