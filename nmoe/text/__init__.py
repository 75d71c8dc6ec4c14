"""Text as token ids: the byte-level tokenizer, the Harmony format, chat templates, and a renderer for each conversation format."""
